#define _GNU_SOURCE
#include "link/pager.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/kiwi_preload.h"
#include "base/log.h"
#include "gate/gate.h"
#include "owner/arena.h"
#include "owner/own.h"

static const int64_t WITHIN_MAX_NS = 3600 * (int64_t)1000000000;

/* Written by the pager thread only; atomics, because the exit handler calls kp_pager_away. */
static bool held; /* the gate is closed and the GPU idle; the gate is also shut if the daemon ordered it */
static bool yielded; /* the driver may have the process: no call of ours until the daemon's next order */
static bool out;  /* held, and the memory is not in the GPU */

/* A program can have given the GPU more work than ends within one order's time. If the gate opened then, the program
 * would fill the queue again, and no order would ever succeed. So the gate stays closed between orders: new work
 * waits, waits pass. It opens if no order follows soon, or if the work does not end for long: it may depend on work
 * that waits at the gate. That is not tried a second time. */
static const int64_t DRAIN_MAX_NS = 60 * (int64_t)1000000000;
static const int64_t NEXT_ORDER_NS = 5 * (int64_t)1000000000; /* the daemon tries again after a second or two */
static bool draining, drained_in_vain;
static int64_t drain_until_ns, next_order_ns;

static void moved(struct kp_outcome *o, uint64_t bytes) {
    *o = (struct kp_outcome){.what = KP_MOVED, .reason = "", .bytes = bytes};
}

static void refused(struct kp_outcome *o, const char *reason, const char *detail) {
    *o = (struct kp_outcome){.what = KP_REFUSED, .reason = reason};
    snprintf(o->detail, sizeof o->detail, "%s", detail);
}

static void set(bool *what, bool to) { __atomic_store_n(what, to, __ATOMIC_RELEASE); }

static void let_go(void) {
    draining = false;
    set(&held, false);
    kp_gate_open();
}

/* Returns whether the gate stays closed although the GPU's work did not end in time. */
static bool keeps_draining(void) {
    int64_t now_ns = kp_now_ns();
    if (drained_in_vain) return false;
    if (!draining) drain_until_ns = now_ns + DRAIN_MAX_NS;
    draining = now_ns < drain_until_ns;
    drained_in_vain = !draining;
    next_order_ns = now_ns + NEXT_ORDER_NS;
    return draining;
}

int64_t kp_pager_due_ns(void) {
    return !draining ? INT64_MAX : next_order_ns < drain_until_ns ? next_order_ns : drain_until_ns;
}

void kp_pager_look(int64_t now_ns) {
    if (now_ns < kp_pager_due_ns()) return;
    drained_in_vain = now_ns >= drain_until_ns;
    kp_note("the gate opens: %s", drained_in_vain ? "the GPU's work does not end" : "nobody wants the GPU any more");
    let_go();
}

/* Ends a yield: the daemon's order means that the driver has let go of the process. */
static void take_back(void) {
    set(&yielded, false);
    kp_gate_take_back();
    kp_arena_stop(false, 0);
}

/* Lets the driver have the process. The arena's thread, which passes the gate, must not be in the driver either. */
static void yield(int64_t until_ns, struct kp_outcome *o) {
    moved(o, 0);
    if (!held || !kp_gate_is_shut()) {
        refused(o, "driver", "its gate is not shut: the driver must not have the process");
    } else if (kp_owning() && !kp_arena_stop(true, until_ns)) {
        kp_arena_stop(false, 0);
        refused(o, "lock-timeout", "a call that prepares host memory did not end in time");
    } else {
        if (kp_owning()) set(&yielded, true);
        kp_gate_take(until_ns);
    }
}

/* Closes the gate, and waits for the GPU's work to end. */
static void settle(int64_t until_ns, struct kp_outcome *o) {
    moved(o, 0);
    if (held) return;
    if (!kp_gate_close(until_ns)) {
        refused(o, "lock-timeout", "a call of the program, or a stream capture, did not end in time");
        return;
    }
    kp_move_settle(until_ns, o);
    set(&held, o->what == KP_MOVED);
    if (held) {
        draining = false;
    } else if (!strcmp(o->reason, "lock-timeout") && keeps_draining()) {
        refused(o, "draining", "work already given to the GPU has not ended yet; new work waits until it has");
    } else {
        let_go();
    }
}

/* Settles and shuts the gate. From here to let_go the driver may have the process, and no thread of the process
 * may be in the driver. */
static void hold(int64_t until_ns, struct kp_outcome *o) {
    settle(until_ns, o);
    if (!held) return;
    if (kp_gate_shut(until_ns)) {
        if (!kp_owning()) kp_gate_take(until_ns); /* no further order says that the driver takes it */
        return;
    }
    refused(o, "lock-timeout", "a wait, or another call of the program, did not end in time");
    let_go();
}

/* ---- ahead of a page-out: the gate has been armed for a while, and the memory is in the GPU ---- */

static const int64_t AHEAD_AFTER_NS = 1000000000, AHEAD_PAUSE_MAX_NS = 64 * (int64_t)1000000000;
static bool ahead; /* the daemon wants it: not all sessions fit */
static int64_t ahead_due_ns = INT64_MAX, ahead_pause_ns;

static void plan_ahead(void) {
    ahead_pause_ns = AHEAD_AFTER_NS;
    ahead_due_ns = ahead && kp_owning() && kp_gate_is_armed() ? kp_now_ns() + AHEAD_AFTER_NS : INT64_MAX;
}

void kp_pager_gate(bool open) {
    kp_gate_arm(!open);
    if (open) kp_move_forget_ahead();
    plan_ahead();
}

void kp_pager_want_ahead(bool wanted) {
    if (wanted == ahead) return;
    ahead = wanted;
    if (!ahead) kp_move_forget_ahead();
    plan_ahead();
}

int64_t kp_pager_ahead_due_ns(void) { return held || draining ? INT64_MAX : ahead_due_ns; }

void kp_pager_ahead(bool (*stop)(void)) {
    if (kp_move_ahead(stop)) {
        ahead_due_ns = INT64_MAX;
        return;
    }
    ahead_due_ns = kp_now_ns() + ahead_pause_ns;
    if (ahead_pause_ns < AHEAD_PAUSE_MAX_NS) ahead_pause_ns *= 2;
}

/* ---- orders ---- */

static void page_out(int64_t until_ns, struct kp_outcome *o) {
    struct kp_books books;
    bool was_held = held, was_out = out;
    take_back();
    if (out) {
        kp_own_books(&books);
        moved(o, books.out);
        if (books.resident == 0) return; /* else a page-out was cut short */
    }
    hold(until_ns, o);
    if (o->what != KP_MOVED) return;
    if (kp_owning()) kp_move_out(until_ns, o); /* else the driver may have the process already */
    /* A refused move brings back the memory that was in; if even that fails, the gate stays closed. */
    set(&out, o->what == KP_MOVED || (o->what == KP_REFUSED && (was_out || !kp_move_all_in())));
    kp_own_books(&books);
    if (o->what == KP_MOVED) o->bytes = books.out;
    /* After a loss the program must see the driver's errors rather than hang. */
    if (o->what == KP_LOST || (o->what == KP_REFUSED && !was_held && !out)) let_go();
}

static void page_in(int64_t until_ns, struct kp_outcome *o) {
    moved(o, 0);
    take_back();
    if (out && kp_owning()) kp_move_in(until_ns, o);
    if (o->what == KP_REFUSED) return;
    set(&out, false);
    if (held || draining) let_go();
    plan_ahead();
}

static void let_run(struct kp_outcome *o) {
    moved(o, 0);
    take_back();
    if (out) refused(o, "driver", "its memory is out of the GPU and has to be paged in first");
    else if (held || draining) let_go();
}

static void perform(const struct kp_message *order, struct kp_outcome *o) {
    int64_t within_ns = order->within_ns < 0 ? 0 : order->within_ns;
    int64_t until_ns = kp_now_ns() + (within_ns < WITHIN_MAX_NS ? within_ns : WITHIN_MAX_NS);
    switch (order->action) {
    case KP_DO_HOLD: hold(until_ns, o); break;
    case KP_DO_FREE: let_run(o); break;
    case KP_DO_PAGE_OUT: page_out(until_ns, o); break;
    case KP_DO_PAGE_IN: page_in(until_ns, o); break;
    case KP_DO_YIELD: yield(until_ns, o); break;
    case KP_DO_OTHER: refused(o, "unsupported", "this version of the preloaded library has no such action");
    }
}

void kp_pager_do(const struct kp_message *order, struct kp_outcome *o, struct kp_done *done) {
    static const char *const outcomes[] = {
        [KP_MOVED] = "moved", [KP_REFUSED] = "refused", [KP_LOST] = "lost"};
    int64_t began_ns = kp_now_ns();
    perform(order, o);
    *done = (struct kp_done){
        .op = order->op,
        .outcome = outcomes[o->what],
        .reason = o->reason ? o->reason : "",
        .detail = o->detail,
        .bytes = o->bytes,
        .elapsed_ns = kp_now_ns() - began_ns,
    };
}

bool kp_pager_yielded(void) {
    return __atomic_load_n(&held, __ATOMIC_ACQUIRE) && (!kp_owning() || __atomic_load_n(&yielded, __ATOMIC_ACQUIRE));
}

bool kp_pager_away(void) { return __atomic_load_n(&out, __ATOMIC_ACQUIRE) || kp_pager_yielded(); }

void kp_pager_lost(void) {
    kp_pager_gate(true);
    if (draining || (held && !out && !kp_pager_yielded())) let_go();
}

void kp_pager_leave(void) {
    kp_gate_arm(false);
    if (held || draining) let_go();
    set(&out, false);
}

const char *kp_pager_state(void) { return out ? "out" : held ? "held" : "resident"; }
