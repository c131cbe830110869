/* Fuzz target: passes any bytes from a daemon's socket through framing, JSON, messages and the pager's state, down
 * to a simulated gate and mover, which check that they are used correctly.
 *
 * The first bytes of an input choose how the other bytes arrive, and how closing, settling and moving end. With
 * libFuzzer: clang -fsanitize=fuzzer,address,undefined fuzz_link.c <sources>; see driver.c for machines without
 * it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "gate/gate.h"
#include "link/agent.h"
#include "link/alone.h"
#include "link/json.h"
#include "link/pager.h"
#include "owner/arena.h"
#include "owner/move.h"
#include "owner/own.h"

#define MUST(condition)                                                                          \
    do {                                                                                         \
        if (!(condition)) fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition), abort(); \
    } while (0)

/* ---- a gate and a mover ------------------------------------------------------------------------ */

static bool closed, shut, taken, armed, out, leaving, owning, decided;
static const uint8_t *choices;
static size_t choices_left;

static unsigned choose(unsigned below) {
    if (!choices_left) return 0;
    choices_left--;
    return *choices++ % below;
}

bool kp_gate_close(int64_t until_ns) {
    (void)until_ns;
    MUST(!closed && !out);
    closed = choose(4) != 3;
    return closed;
}
bool kp_gate_shut(int64_t until_ns) {
    (void)until_ns;
    MUST(closed);
    shut = shut || choose(4) != 3;
    return shut;
}
void kp_gate_take(int64_t until_ns) {
    (void)until_ns;
    MUST(shut);
    taken = true;
}
void kp_gate_take_back(void) { taken = false; }
bool kp_gate_is_taken(void) { return taken; }
bool kp_gate_is_shut(void) { return shut; }
void kp_gate_ask_again(void) { MUST(shut); }
bool kp_owning(void) { return owning; }
bool kp_own_decided(void) { return decided; }
bool kp_own_asked(void) { return choose(2); }
bool kp_own_decide(bool own) {
    MUST(!closed && !out);
    if (!decided) owning = own, decided = true;
    return own == owning;
}
void kp_gate_open(void) {
    MUST(closed && (!out || leaving));
    closed = shut = taken = false;
}
void kp_gate_arm(bool now) { armed = now; }
bool kp_gate_is_armed(void) { return armed; }
bool kp_gate_capturing(void) { return false; }
bool kp_gate_stand_aside(void) { return false; }
void kp_gate_come_back(void) {}

static void answer(struct kp_outcome *o) {
    memset(o, 0xAA, sizeof *o); /* the caller must not read a member that is not set below */
    o->what = (enum kp_what)choose(3);
    o->reason = o->what == KP_MOVED ? "" : "no-room";
    o->bytes = choose(200);
    o->elapsed_ns = choose(200);
    strcpy(o->detail, "as the input \"says\"\n");
}
void kp_move_settle(int64_t until_ns, struct kp_outcome *o) {
    (void)until_ns;
    MUST(closed && !out);
    answer(o);
}
void kp_move_out(int64_t until_ns, struct kp_outcome *o) {
    (void)until_ns;
    MUST(closed && shut && owning);
    bool broken_off = out || choose(4) == 3; /* a refused move does not bring the memory back */
    answer(o);
    out = o->what == KP_MOVED || (o->what == KP_REFUSED && broken_off);
}
bool kp_move_all_in(void) { return !out; }
void kp_arena_enable(bool on) { (void)on; }
void kp_arena_allow(uint64_t bytes) { (void)bytes; }
void kp_arena_await_limit(void) {}
bool kp_move_ahead(bool (*stop)(void)) { return !stop(); }
void kp_move_forget_ahead(void) {}
void kp_arena_books(struct kp_arena_books *books) { memset(books, 0, sizeof *books); }
bool kp_arena_stop(bool on, int64_t until_ns) { return !on || until_ns > 0; }
void kp_move_in(int64_t until_ns, struct kp_outcome *o) {
    (void)until_ns;
    MUST(closed && out && owning);
    answer(o);
    out = o->what == KP_REFUSED;
}
void kp_own_books(struct kp_books *books) {
    memset(books, 0, sizeof *books);
    books->unowned[0] = choose(2);
    books->resident = choose(2); /* may be set while out: a page-out was cut short */
}
void kp_need_take(struct kp_need *need) { *need = (struct kp_need){choose(2), choose(2), choose(2)}; }
uint64_t kp_own_ipc_refused(void) { return choose(2); }
const char *kp_foreign_name(enum kp_foreign kind) { return kind ? "array" : "pool"; }
void kp_log(bool warning, const char *format, ...) { (void)warning, (void)format; }

/* ---- checks --------------------------------------------------------------------------------------- */

static void check_said(void) {
    for (char *line = kp_wire.out, *end = kp_wire.out + kp_wire.unsent; line < end;) {
        char *stop = memchr(line, '\n', (size_t)(end - line)), type[32];
        struct kp_json_field tag = {"type", KP_JSON_TEXT, type, sizeof type, false};
        MUST(stop && kp_json_read(line, (size_t)(stop - line), &tag, 1) && tag.found);
        line = stop + 1;
    }
    kp_wire.unsent = 0;
}

static bool receive(const uint8_t *data, size_t size, size_t at_once) {
    struct kp_frames *in = &kp_wire.in;
    while (size) {
        size_t room = sizeof in->bytes - in->used, count = size < at_once ? size : at_once;
        MUST(room > 0);
        if (count > room) count = room;
        memcpy(in->bytes + in->used, data, count);
        if (!kp_frames_receive(in, count, kp_protocol_receive)) return false;
        MUST(in->used <= KP_LINE_MAX_BYTES);
        MUST(kp_protocol_send_due((int64_t)size));
        check_said();
        data += count;
        size -= count;
    }
    return true;
}

/* Checks that any written text is read back unchanged, except for invalid UTF-8. */
static void check_text(const uint8_t *data, size_t size) {
    static char text[300], line[4096], back[2048];
    struct kp_json_field field = {"t", KP_JSON_TEXT, back, sizeof back, false};
    struct kp_json_out json;
    size_t length = size < sizeof text ? size : sizeof text - 1;
    memcpy(text, data, length);
    text[length] = 0;
    kp_json_begin(&json, line, sizeof line);
    kp_json_text(&json, "t", text, sizeof text);
    size_t written = kp_json_end(&json, line);
    MUST(written && kp_json_read(line, written, &field, 1) && field.found);
    bool clean = true;
    const unsigned char *p = (const unsigned char *)text, *end = p + strlen(text);
    for (size_t n; p < end && clean; p += n) clean = (n = kp_utf8_character(p, end)) > 0;
    MUST(!clean || !strcmp(back, text));
}

/* Reads each line from memory of exactly its size, so that a sanitizer notices a read beyond it. */
static void check_lines(const uint8_t *data, size_t size) {
    static struct kp_message message;
    while (size) {
        const uint8_t *stop = memchr(data, '\n', size);
        size_t length = stop ? (size_t)(stop - data) : size, used = length + (stop != NULL);
        char *line = malloc(length + !length);
        MUST(line);
        memcpy(line, data, length);
        kp_message_read(line, length, &message);
        free(line);
        data += used;
        size -= used;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    enum { CHOICES = 64 };
    if (size < CHOICES + 1) return 0;
    choices = data + 1;
    choices_left = CHOICES;
    closed = shut = taken = armed = out = leaving = false;
    owning = choose(4) != 3;
    decided = choose(2);
    kp_wire.unsent = kp_wire.in.used = 0;
    MUST(kp_protocol_begin());
    check_said();
    check_text(data, size);
    check_lines(data + CHOICES + 1, size - CHOICES - 1);
    receive(data + CHOICES + 1, size - CHOICES - 1, (size_t)data[0] * data[0] + 1);
    check_said();
    kp_protocol_disconnected();
    kp_pager_lost();
    kp_link_set_connected(false);
    bool stood = kp_pager_yielded();
    MUST(!armed && closed == (out || stood));
    kp_alone_begin(0);
    kp_alone(INT64_MAX);
    MUST(!armed && closed == (out || stood) && kp_pager_yielded() == stood);
    kp_alone_end();
    leaving = true;
    kp_pager_leave();
    MUST(!closed && !armed);
    return 0;
}
