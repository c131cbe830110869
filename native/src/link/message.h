/* The messages of the role `pager` (docs/protocol.md), as structs and as lines. This part touches nothing
 * else, so the fuzzer and the tests can call it with any input. */
#ifndef KP_MESSAGE_H
#define KP_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KP_PROTOCOL = 1, KP_LINE_MAX_BYTES = 65536 };

enum kp_message_type {
    KP_MESSAGE_GARBAGE, /* breaks a rule of the protocol: the sender is no Kiwi daemon */
    KP_MESSAGE_OTHER,   /* has a type that this version does not know: ignored */
    KP_MESSAGE_WELCOME,
    KP_MESSAGE_ERROR,
    KP_MESSAGE_GATE,
    KP_MESSAGE_DO,
    KP_MESSAGE_ROOM,
    KP_MESSAGE_LIMITS,
    KP_MESSAGE_PONG,
};

enum kp_action { KP_DO_OTHER, KP_DO_HOLD, KP_DO_FREE, KP_DO_PAGE_OUT, KP_DO_PAGE_IN, KP_DO_YIELD };

struct kp_message {
    enum kp_message_type what;
    int64_t protocol;                         /* welcome */
    bool own, says_own;                       /* likewise; an older daemon does not say */
    char own_why[64];
    bool open;                                /* gate */
    int64_t op, within_ns;                    /* pager-do */
    char action_name[32];
    enum kp_action action;
    int64_t request;                          /* room */
    bool granted;
    int64_t arena_bytes;                      /* pager-limits; below 0: no limit by the daemon */
    bool ahead;                               /* pager-limits */
    bool fatal;                               /* error */
    char code[64], text[512], remedy[512];
};

void kp_message_read(const char *line, size_t length, struct kp_message *message);

struct kp_count { /* memory of one kind that is not owned */
    const char *kind;
    uint64_t count;
};

struct kp_report { /* pager-state */
    const char *state;
    uint64_t resident, out, arena, unowned;
    uint64_t held, peak, lacked; /* struct kp_need */
    uint64_t ipc_refused;
    const struct kp_count *counts;
    size_t kinds;
};

struct kp_done { /* pager-done */
    int64_t op;
    const char *outcome, *reason, *detail;
    uint64_t bytes;
    int64_t elapsed_ns;
};

/* Each writes a line and returns the line's length; 0: `room` is too small. */
size_t kp_write_hello(char *line, size_t room, const char *client, const char *name, bool owns, bool could_own);
size_t kp_write_ping(char *line, size_t room);
size_t kp_write_state(char *line, size_t room, const struct kp_report *report);
size_t kp_write_done(char *line, size_t room, const struct kp_done *done);
/* `field`: a boolean field of the message, or NULL. */
size_t kp_write_want_lease(char *line, size_t room, const char *field, bool value);
size_t kp_write_want_room(char *line, size_t room, uint64_t request, uint64_t bytes);

#endif
