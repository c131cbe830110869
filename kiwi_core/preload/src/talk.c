/* The messages between this process and the daemon on one connection (docs/protocol.md). */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "agent.h"
#include "alone.h"
#include "arena.h"
#include "gate.h"
#include "kiwi_preload.h"
#include "log.h"
#include "own.h"
#include "pager.h"

static const int64_t STATE_EVERY_NS = 250 * (int64_t)1000000; /* between states in which only bytes changed */
static const uint64_t INTEGER_LIMIT = (uint64_t)1 << 53;
enum { LINE_ROOM = 4096 }; /* more than the longest line that is sent */
enum { BEATS = 3 };

struct kp_wire kp_wire = {.socket.fd = -1};
enum kp_regard kp_talk_regard;

static bool welcomed, caught_up;
static const char *state_said; /* the state sent last; NULL: none yet on this connection */
static int64_t state_said_ns;
static bool bytes_unsaid;
static bool lease_asked;
static int64_t next_beat_ns = INT64_MAX;
static unsigned unanswered;

/* ---- sent ------------------------------------------------------------------------------------ */

/* Queues a line. False: the line did not fit, because the daemon has not read the earlier ones. */
static bool queue(size_t length) {
    kp_wire_queue(&kp_wire, length);
    return length > 0;
}

bool kp_talk_begin(void) {
    welcomed = caught_up = bytes_unsaid = lease_asked = false;
    state_said = NULL;
    next_beat_ns = INT64_MAX;
    unanswered = 0;
    kp_talk_regard = KP_WELCOME_AGAIN;
    /* The answer to the ping means that the daemon has sent all its first messages. */
    return queue(kp_say_hello(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), "kiwi-preload " KP_VERSION,
                              program_invocation_short_name, kp_owning())) &&
           queue(kp_say_ping(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire)));
}

/* Returns the nearest number that the protocol allows. (A count below zero is a fault of this library; the
 * daemon would close the connection for it.) */
static uint64_t sayable(uint64_t count) {
    return (int64_t)count < 0 ? 0 : count < INTEGER_LIMIT ? count : INTEGER_LIMIT - 1;
}

static bool say_state(int64_t now_ns) {
    struct kp_books books;
    struct kp_count counts[KP_FOREIGN_KINDS];
    struct kp_report report = {.state = kp_pager_state(), .counts = counts, .kinds = KP_FOREIGN_KINDS};
    struct kp_arena_books host;
    kp_link_take_books(); /* first: a change from here on is sent the next time */
    kp_own_books(&books);
    kp_arena_books(&host);
    for (size_t i = 0; i < KP_FOREIGN_KINDS; i++) {
        counts[i] = (struct kp_count){kp_foreign_name((enum kp_foreign)i), sayable(books.unowned[i])};
        report.unowned += counts[i].count;
    }
    report.unowned = sayable(report.unowned);
    report.resident = sayable(books.resident);
    report.out = sayable(books.out);
    report.arena = sayable(host.pinned + host.pageable);
    state_said = report.state;
    state_said_ns = now_ns;
    bytes_unsaid = false;
    return queue(kp_say_state(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), &report));
}

static bool say_room_requests(void) {
    uint64_t request, bytes;
    /* Otherwise the thread that wanted the lease has been let through meanwhile. */
    if (kp_link_take_lease() && (kp_gate_is_armed() || kp_gate_is_shut())) {
        lease_asked = true;
        if (!queue(kp_say_want_lease(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire)))) return false;
    }
    while (kp_wire_room(&kp_wire) >= LINE_ROOM && kp_link_take_room(&request, &bytes))
        if (!queue(kp_say_want_room(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), request, bytes)))
            return false;
    return true;
}

/* Returns whether some thread of the program waits until the daemon sends a message. */
static bool waits(void) { return lease_asked || kp_link_room_wanted() || strcmp(kp_pager_state(), "resident"); }

/* Pings the daemon while something waits for it: a daemon that hangs does not close its socket. Counts rounds
 * of this thread, not time: after a pause of the whole process, the answer may be there and still has to be
 * read. False: the daemon has stopped answering. */
static bool beat(int64_t now_ns) {
    int64_t every_ns = kp_alone_silence_ns() / BEATS;
    if (!waits()) {
        next_beat_ns = INT64_MAX;
        unanswered = 0;
        return true;
    }
    if (next_beat_ns == INT64_MAX) next_beat_ns = now_ns + every_ns;
    if (now_ns < next_beat_ns) return true;
    next_beat_ns = now_ns + every_ns;
    if (unanswered++ >= BEATS) {
        kp_warn("the Kiwi daemon does not answer any more: this program goes on without it as far as it can. "
                "See whether it hangs, or start it again.");
        return false;
    }
    if (kp_wire_room(&kp_wire) < LINE_ROOM) return true; /* the daemon has not read the earlier lines yet */
    return queue(kp_say_ping(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire)));
}

bool kp_talk_say(int64_t now_ns) {
    if (!welcomed) return true;
    if (!beat(now_ns)) return false;
    if (kp_wire_room(&kp_wire) < LINE_ROOM) return true; /* later */
    bytes_unsaid = bytes_unsaid || kp_link_take_books(); /* while the flag stays raised, nobody wakes us again */
    bool due = bytes_unsaid && now_ns >= state_said_ns + STATE_EVERY_NS;
    if ((state_said != kp_pager_state() || due) && !say_state(now_ns)) return false;
    return say_room_requests();
}

int64_t kp_talk_due_ns(void) {
    int64_t due_ns = bytes_unsaid ? state_said_ns + STATE_EVERY_NS : INT64_MAX;
    return !welcomed ? INT64_MAX : next_beat_ns < due_ns ? next_beat_ns : due_ns;
}

bool kp_talk_welcomed(void) { return welcomed; }
bool kp_talk_caught_up(void) { return caught_up; }

void kp_talk_over(void) {
    if (welcomed) kp_arena_allow(UINT64_MAX); /* a daemon that never answered set no limit, and must not lift our own */
    welcomed = false;
}

/* ---- received -------------------------------------------------------------------------------- */

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
        kp_alone_over();
        kp_link_now_connected(true);
        if (kp_gate_is_shut()) kp_gate_ask_again();
    }
    return true;
}

/* Removes control characters: text of another program is shown on a terminal, and must not control it. */
static void make_plain(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < ' ' || *text == 0x7F) *text = ' ';
}

static bool says_full(const char *code) { /* the same codes as in kiwi_core/errors.py */
    static const char *const full[] = {"too-many-connections", "too-many-sessions", "too-much-unread", "silent"};
    for (size_t i = 0; i < sizeof full / sizeof *full; i++)
        if (!strcmp(code, full[i])) return true;
    return false;
}

static enum kp_regard regard_of(const char *code) {
    if (!strcmp(code, "superseded")) return KP_REPLACED;
    return !welcomed && says_full(code) ? KP_FULL : KP_REJECTED;
}

static bool hear_error(struct kp_message *m) {
    make_plain(m->code);
    make_plain(m->text);
    make_plain(m->remedy);
    kp_note("the daemon says %s: %s %s", m->code, m->text, m->remedy);
    if (!m->fatal) return true;
    kp_talk_regard = regard_of(m->code);
    if (!welcomed && kp_talk_regard == KP_FULL)
        kp_warn("this program waits for a place at the Kiwi daemon: %s %s", m->text, m->remedy);
    else if (!welcomed)
        kp_warn("the Kiwi daemon refused this program, which runs without Kiwi: %s %s", m->text, m->remedy);
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
    /* Send the state first, so that the daemon knows it when the answer arrives. */
    return say_state(kp_now_ns()) &&
           queue(kp_say_done(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), &done));
}

bool kp_talk_heard(const char *line, size_t length) {
    static struct kp_message m; /* large, and only one thread comes here */
    kp_message_read(line, length, &m);
    bool early = !welcomed && m.what > KP_HEARD_ERROR;
    if (m.what == KP_HEARD_GARBAGE || early) {
        kp_warn("something that is no Kiwi daemon answers at the daemon's socket; it is ignored. "
                "See who put it there, or set KIWI_SOCKET_DIR.");
        return false;
    }
    switch (m.what) {
    case KP_HEARD_WELCOME: return hear_welcome(&m);
    case KP_HEARD_ERROR: return hear_error(&m);
    case KP_HEARD_GATE:
        lease_asked = lease_asked && !m.open;
        kp_pager_gate(m.open);
        return true;
    case KP_HEARD_DO: return hear_do(&m);
    case KP_HEARD_PONG:
        caught_up = true;
        unanswered = 0;
        return true;
    case KP_HEARD_LIMITS: kp_arena_allow(m.arena_bytes < 0 ? UINT64_MAX : (uint64_t)m.arena_bytes); return true;
    case KP_HEARD_ROOM: kp_link_answer_room((uint64_t)m.request, m.granted); return true;
    default: return true;
    }
}
