/* One connection to a daemon: whole lines in and out. Only kp_wire_open waits. Used by the pager thread only;
 * a forked child may close its copy. */
#ifndef KP_WIRE_H
#define KP_WIRE_H

#include <stdbool.h>
#include <stddef.h>

#include "message.h"

/* Cuts what comes in into lines. */
struct kp_frames {
    size_t used;
    char bytes[KP_LINE_MAX_BYTES + 1];
};

/* Called for each whole line, without its end; false: no more of this connection. */
typedef bool kp_line_fn(const char *line, size_t length);

/* `count` bytes were put at `bytes + used`: hands out the lines that they complete. False: `take` said
 * so, or a line is longer than the limit. */
bool kp_frames_came(struct kp_frames *frames, size_t count, kp_line_fn *take);

/* A descriptor of ours. A program may close what it does not know, and open something of its own at the
 * same number: that must be left alone. */
struct kp_descriptor {
    int fd; /* -1: none */
    unsigned long inode;
};
struct kp_descriptor kp_descriptor(int fd);
bool kp_descriptor_is_ours(const struct kp_descriptor *d);
void kp_descriptor_close(struct kp_descriptor *d);

struct kp_wire {
    struct kp_descriptor socket;
    size_t unsent;
    struct kp_frames in;
    char out[KP_LINE_MAX_BYTES];
};

/* False: errno says why; EAGAIN: for a second the daemon had no place for a connection. */
bool kp_wire_open(struct kp_wire *wire, const char *path);

/* Where the next line may be written, and how much room there is for it; then `kp_wire_queue` it. */
static inline char *kp_wire_next(struct kp_wire *wire) { return wire->out + wire->unsent; }
static inline size_t kp_wire_room(const struct kp_wire *wire) { return sizeof wire->out - wire->unsent; }
static inline void kp_wire_queue(struct kp_wire *wire, size_t length) { wire->unsent += length; }

bool kp_wire_flush(struct kp_wire *wire);                     /* false: the connection is gone */
bool kp_wire_receive(struct kp_wire *wire, kp_line_fn *take); /* likewise, or `take` said so */

#endif
