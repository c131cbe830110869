/* The messages between this process and the daemon on one connection (docs/protocol.md). */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "base/kiwi_preload.h"
#include "base/log.h"
#include "gate/gate.h"
#include "link/agent.h"
#include "link/alone.h"
#include "link/pager.h"
#include "owner/arena.h"
#include "owner/own.h"

static const int64_t STATE_EVERY_NS = 250 * (int64_t)1000000; /* between states in which only bytes changed */
static const uint64_t INTEGER_LIMIT = (uint64_t)1 << 53;
enum { LINE_ROOM = 4096 }; /* more than the longest line that is sent */
enum { BEATS = 3 };

struct kp_wire kp_wire = {.socket.fd = -1};
enum kp_reconnect kp_protocol_reconnect;

static bool welcomed, caught_up;
static bool undecided; /* the hello of this connection has left it to the daemon who owns the memory */
static const char *sent_state; /* the state sent last; NULL: none yet on this connection */
static int64_t sent_state_ns;
static bool bytes_unsent;
static bool lease_asked;
static int64_t next_beat_ns = INT64_MAX;
static unsigned unanswered;

/* ---- sent ------------------------------------------------------------------------------------ */

/* Queues a line. False: the line did not fit, because the daemon has not read the earlier ones. */
static bool queue(size_t length) {
    kp_wire_queue(&kp_wire, length);
    return length > 0;
}

bool kp_protocol_begin(void) {
    welcomed = caught_up = bytes_unsent = lease_asked = false;
    sent_state = NULL;
    next_beat_ns = INT64_MAX;
    unanswered = 0;
    kp_protocol_reconnect = KP_WELCOME_AGAIN;
    undecided = !kp_own_decided();
    /* The answer to the ping means that the daemon has sent all its first messages. */
    return queue(kp_write_hello(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), "kiwi-preload " KP_VERSION,
                              program_invocation_short_name, undecided ? kp_own_asked() : kp_owning(), undecided)) &&
           queue(kp_write_ping(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire)));
}

/* Returns the nearest number that the protocol allows. (A count below zero is a fault of this library; the
 * daemon would close the connection for it.) */
static uint64_t clamped_integer(uint64_t count) {
    return (int64_t)count < 0 ? 0 : count < INTEGER_LIMIT ? count : INTEGER_LIMIT - 1;
}

static bool send_state(int64_t now_ns) {
    struct kp_books books;
    struct kp_count counts[KP_FOREIGN_KINDS];
    struct kp_report report = {.state = kp_pager_state(), .counts = counts, .kinds = KP_FOREIGN_KINDS};
    struct kp_arena_books host;
    struct kp_need need;
    kp_link_take_books(); /* first: a change from here on is sent the next time */
    kp_own_books(&books);
    kp_need_take(&need);
    kp_arena_books(&host);
    for (size_t i = 0; i < KP_FOREIGN_KINDS; i++) {
        counts[i] = (struct kp_count){kp_foreign_name((enum kp_foreign)i), clamped_integer(books.unowned[i])};
        if (i != KP_FOREIGN_IPC) report.unowned += counts[i].count; /* what is shared the driver cannot move either */
    }
    report.unowned = clamped_integer(report.unowned);
    report.resident = clamped_integer(books.resident);
    report.out = clamped_integer(books.out);
    report.held = clamped_integer(need.held);
    report.peak = clamped_integer(need.peak);
    report.lacked = clamped_integer(need.lacked);
    report.ipc_refused = kp_own_ipc_refused();
    report.arena = clamped_integer(host.pinned + host.pageable);
    sent_state = report.state;
    sent_state_ns = now_ns;
    bytes_unsent = false;
    return queue(kp_write_state(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), &report));
}

static bool send_room_requests(void) {
    uint64_t request, bytes;
    bool unwanted = kp_link_take_no_lease(), wanted = kp_link_take_lease();
    if (unwanted && !wanted && lease_asked) {
        lease_asked = false;
        if (!queue(kp_write_want_lease(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), "waits", false))) return false;
    }
    /* If the gate is open by now, the thread that wanted the lease has been let through. */
    if (wanted && (kp_gate_is_armed() || kp_gate_is_shut())) {
        lease_asked = true;
        if (!queue(kp_write_want_lease(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), NULL, false))) return false;
    }
    if (kp_link_take_context() && kp_gate_is_taken() &&
        !queue(kp_write_want_lease(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), "context", true)))
        return false;
    while (kp_wire_room(&kp_wire) >= LINE_ROOM && kp_link_take_room(&request, &bytes))
        if (!queue(kp_write_want_room(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), request, bytes)))
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
    return queue(kp_write_ping(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire)));
}

bool kp_protocol_send_due(int64_t now_ns) {
    if (!welcomed) return true;
    if (!beat(now_ns)) return false;
    if (kp_wire_room(&kp_wire) < LINE_ROOM) return true; /* later */
    bytes_unsent = bytes_unsent || kp_link_take_books(); /* while the flag stays raised, nobody wakes us again */
    bool due = bytes_unsent && now_ns >= sent_state_ns + STATE_EVERY_NS;
    if ((sent_state != kp_pager_state() || due) && !send_state(now_ns)) return false;
    return send_room_requests();
}

int64_t kp_protocol_due_ns(void) {
    int64_t due_ns = bytes_unsent ? sent_state_ns + STATE_EVERY_NS : INT64_MAX;
    return !welcomed ? INT64_MAX : next_beat_ns < due_ns ? next_beat_ns : due_ns;
}

bool kp_protocol_welcomed(void) { return welcomed; }
bool kp_protocol_caught_up(void) { return caught_up; }

void kp_protocol_disconnected(void) {
    if (welcomed) kp_arena_allow(UINT64_MAX); /* a daemon that never answered set no limit, and must not lift our own */
    welcomed = false;
}

/* ---- received -------------------------------------------------------------------------------- */

/* Removes control characters: text of another program is shown on a terminal, and must not control it. */
static void make_plain(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < ' ' || *text == 0x7F) *text = ' ';
}

/* Takes the daemon's decision who owns the program's memory. False: it came too late, and the library is what it is; the
 * daemon learns that from the next hello. */
static bool take_decision(const struct kp_message *m) {
    bool own = m->says_own ? m->own : kp_own_asked();
    if (!undecided) return true;
    undecided = false;
    if (!own && kp_own_asked()) kp_note("the daemon leaves this program's memory to the driver: %s", m->own_why);
    return kp_own_decide(own);
}

static bool handle_welcome(struct kp_message *m) {
    if (m->protocol != KP_PROTOCOL) {
        kp_warn("the Kiwi daemon speaks version %lld of the protocol, this program's library version %d: "
                "it runs without Kiwi. Install the same version of Kiwi for both and start them again.",
                (long long)m->protocol, KP_PROTOCOL);
        kp_protocol_reconnect = KP_REJECTED;
        return false;
    }
    make_plain(m->own_why);
    if (!take_decision(m)) return false;
    if (!welcomed) {
        welcomed = true;
        kp_arena_await_limit();
        kp_alone_end();
        kp_link_set_connected(true);
        if (kp_gate_is_shut()) kp_gate_ask_again();
    }
    return true;
}

static bool is_full_code(const char *code) { /* the same codes as in kiwi_core/errors.py */
    static const char *const full[] = {"too-many-connections", "too-many-sessions", "too-much-unread", "silent"};
    for (size_t i = 0; i < sizeof full / sizeof *full; i++)
        if (!strcmp(code, full[i])) return true;
    return false;
}

static enum kp_reconnect reconnect_after(const char *code) {
    if (!strcmp(code, "superseded")) return KP_REPLACED;
    return !welcomed && is_full_code(code) ? KP_FULL : KP_REJECTED;
}

static bool handle_error(struct kp_message *m) {
    make_plain(m->code);
    make_plain(m->text);
    make_plain(m->remedy);
    kp_note("the daemon says %s: %s %s", m->code, m->text, m->remedy);
    if (!m->fatal) return true;
    kp_protocol_reconnect = reconnect_after(m->code);
    if (!welcomed && kp_protocol_reconnect == KP_FULL)
        kp_warn("this program waits for a place at the Kiwi daemon: %s %s", m->text, m->remedy);
    else if (!welcomed)
        kp_warn("the Kiwi daemon refused this program, which runs without Kiwi: %s %s", m->text, m->remedy);
    return false;
}

static bool handle_do(const struct kp_message *m) {
    struct kp_outcome outcome;
    struct kp_done done;
    kp_pager_do(m, &outcome, &done);
    kp_note("operation %lld: %s %s %s, %llu bytes in %lld us", (long long)m->op, done.outcome, done.reason,
            done.detail, (unsigned long long)done.bytes, (long long)(done.elapsed_ns / 1000));
    if (outcome.what == KP_LOST)
        kp_warn("the contents of this program's GPU memory are lost (%s). Start it again.", done.detail);
    /* Send the state first, so that the daemon knows it when the answer arrives. */
    return send_state(kp_now_ns()) &&
           queue(kp_write_done(kp_wire_next(&kp_wire), kp_wire_room(&kp_wire), &done));
}

static void handle_room(const struct kp_message *m) {
    static bool told;
    if (!m->granted && m->remedy[0] && !told) {
        told = true; /* a program may try again and again */
        kp_warn("out of GPU memory: %s", m->remedy);
    }
    kp_link_answer_room((uint64_t)m->request, m->granted);
}

static void handle_limits(const struct kp_message *m) {
    struct kp_arena_books host;
    kp_arena_books(&host);
    bool less = m->arena_bytes >= 0 && (uint64_t)m->arena_bytes < host.pinned + host.pageable;
    kp_pager_want_ahead(m->ahead && !less); /* copies ahead must not keep what is to be given back */
    kp_arena_allow(m->arena_bytes < 0 ? UINT64_MAX : (uint64_t)m->arena_bytes);
}

bool kp_protocol_receive(const char *line, size_t length) {
    static struct kp_message m; /* large, and only one thread comes here */
    kp_message_read(line, length, &m);
    bool early = !welcomed && m.what > KP_MESSAGE_ERROR;
    if (m.what == KP_MESSAGE_GARBAGE || early) {
        kp_warn("something that is no Kiwi daemon answers at the daemon's socket; it is ignored. "
                "See who put it there, or set KIWI_SOCKET_DIR.");
        return false;
    }
    switch (m.what) {
    case KP_MESSAGE_WELCOME: return handle_welcome(&m);
    case KP_MESSAGE_ERROR: return handle_error(&m);
    case KP_MESSAGE_GATE:
        lease_asked = lease_asked && !m.open;
        kp_pager_gate(m.open);
        return true;
    case KP_MESSAGE_DO: return handle_do(&m);
    case KP_MESSAGE_PONG:
        caught_up = true;
        unanswered = 0;
        return true;
    case KP_MESSAGE_LIMITS: handle_limits(&m); return true;
    case KP_MESSAGE_ROOM: handle_room(&m); return true;
    default: return true;
    }
}
