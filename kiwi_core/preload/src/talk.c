/* What this process and the daemon say to each other on one connection (docs/protocol.md). */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "agent.h"
#include "gate.h"
#include "kiwi_preload.h"
#include "log.h"
#include "own.h"
#include "pager.h"

static const int64_t STATE_EVERY_NS = 250 * (int64_t)1000000; /* at most, while only bytes change */
static const uint64_t INTEGER_LIMIT = (uint64_t)1 << 53;
enum { LINE_ROOM = 4096 }; /* more than the longest line that is said */

struct kp_wire kp_wire = {.socket.fd = -1};
enum kp_regard kp_talk_regard;

static bool welcomed, caught_up;
static const char *state_said; /* NULL: none yet on this connection */
static int64_t state_said_ns;
static bool bytes_unsaid;

/* ---- said ------------------------------------------------------------------------------------ */

/* False: it did not fit, because the daemon has not taken what came before. */
static bool queue(size_t length) {
    kp_wire_queue(&kp_wire, length);
    return length > 0;
}

bool kp_talk_begin(void) {
    welcomed = caught_up = bytes_unsaid = false;
    state_said = NULL;
    kp_talk_regard = KP_WELCOME_AGAIN;
    /* The answer to the ping says that all there is to be said at first has been said. */
    return queue(kp_say_hello(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), "kiwi-preload " KP_VERSION,
                              program_invocation_short_name)) &&
           queue(kp_say_ping(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire)));
}

/* What the protocol can say. (A count that went below zero is a mistake of ours, not a reason to be cut off.) */
static uint64_t sayable(uint64_t count) {
    return (int64_t)count < 0 ? 0 : count < INTEGER_LIMIT ? count : INTEGER_LIMIT - 1;
}

static bool say_state(int64_t now_ns) {
    struct kp_books books;
    struct kp_count counts[KP_FOREIGN_KINDS];
    struct kp_report report = {.state = kp_pager_state(), .counts = counts, .kinds = KP_FOREIGN_KINDS};
    kp_own_books(&books);
    for (size_t i = 0; i < KP_FOREIGN_KINDS; i++) {
        counts[i] = (struct kp_count){kp_foreign_name((enum kp_foreign)i), sayable(books.unowned[i])};
        report.unowned += counts[i].count;
    }
    report.unowned = sayable(report.unowned);
    report.resident = sayable(books.resident);
    report.out = sayable(books.out);
    report.kept = sayable(books.kept);
    state_said = report.state;
    state_said_ns = now_ns;
    bytes_unsaid = false;
    return queue(kp_say_state(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), &report));
}

static bool say_wishes(void) {
    uint64_t request, bytes;
    /* Without an armed gate, whoever wanted a lease has been let through meanwhile. */
    if (kp_link_take_lease() && kp_gate_is_armed() &&
        !queue(kp_say_want_lease(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire))))
        return false;
    while (kp_wire_room(&kp_wire) >= LINE_ROOM && kp_link_take_room(&request, &bytes))
        if (!queue(kp_say_want_room(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), request, bytes)))
            return false;
    return true;
}

bool kp_talk_say(int64_t now_ns) {
    if (!welcomed || kp_wire_room(&kp_wire) < LINE_ROOM) return true; /* later */
    bytes_unsaid = kp_link_take_books() || bytes_unsaid;
    if ((state_said != kp_pager_state() || now_ns >= kp_talk_due_ns()) && !say_state(now_ns)) return false;
    return say_wishes();
}

int64_t kp_talk_due_ns(void) {
    return welcomed && bytes_unsaid ? state_said_ns + STATE_EVERY_NS : INT64_MAX;
}

bool kp_talk_welcomed(void) { return welcomed; }
bool kp_talk_caught_up(void) { return caught_up; }

void kp_talk_over(void) { welcomed = false; }

/* ---- heard ----------------------------------------------------------------------------------- */

static bool hear_welcome(const struct kp_message *m) {
    if (m->protocol != KP_PROTOCOL) {
        kp_warn("the Kiwi daemon speaks version %lld of the protocol, this program's library version %d: "
                "it runs without Kiwi. Install the same version of Kiwi for both and start them again.",
                (long long)m->protocol, KP_PROTOCOL);
        kp_talk_regard = KP_REJECTED;
        return false;
    }
    if (!welcomed) {
        welcomed = true;
        kp_link_now_connected(true);
    }
    return true;
}

/* What another program wrote is shown on a terminal: nothing in it may steer that. */
static void make_plain(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < ' ' || *text == 0x7F) *text = ' ';
}

static bool hear_error(struct kp_message *m) {
    make_plain(m->code);
    make_plain(m->text);
    make_plain(m->remedy);
    kp_note("the daemon says %s: %s %s", m->code, m->text, m->remedy);
    if (!m->fatal) return true;
    kp_talk_regard = strcmp(m->code, "superseded") ? KP_REJECTED : KP_REPLACED;
    if (!welcomed)
        kp_warn("the Kiwi daemon turned this program away, which runs without Kiwi: %s %s", m->text, m->remedy);
    return false;
}

static bool hear_do(const struct kp_message *m) {
    struct kp_outcome outcome;
    struct kp_done done;
    kp_pager_do(m, &outcome, &done);
    kp_note("operation %lld: %s %s %s, %llu bytes in %lld us", (long long)m->op, done.outcome, done.reason,
            done.detail, (unsigned long long)done.bytes, (long long)(done.elapsed_ns / 1000));
    if (outcome.what == KP_LOST)
        kp_warn("the contents of this program's GPU memory are lost (%s). Start it again.", done.detail);
    /* First how things are now, so that the answer finds it known. */
    return say_state(kp_now_ns()) &&
           queue(kp_say_done(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), &done));
}

bool kp_talk_heard(const char *line, size_t length) {
    static struct kp_message m; /* large, and only one thread comes here */
    kp_message_read(line, length, &m);
    bool early = !welcomed && m.what > KP_HEARD_ERROR;
    if (m.what == KP_HEARD_GARBAGE || early) {
        kp_warn("something that is no Kiwi daemon answers at the daemon's socket; it is not listened to. "
                "See who put it there, or set KIWI_SOCKET_DIR.");
        return false;
    }
    switch (m.what) {
    case KP_HEARD_WELCOME: return hear_welcome(&m);
    case KP_HEARD_ERROR: return hear_error(&m);
    case KP_HEARD_GATE: kp_pager_gate(m.open); return true;
    case KP_HEARD_DO: return hear_do(&m);
    case KP_HEARD_PONG: caught_up = true; return true;
    case KP_HEARD_ROOM: kp_link_answer_room((uint64_t)m.request, m.granted); return true;
    default: return true;
    }
}
