/* One connection to a daemon: whole lines in and out. Only kp_wire_open waits. For the pager thread only; a
 * forked child may close its copy. */
#ifndef KP_WIRE_H
#define KP_WIRE_H

#include <stdbool.h>
#include <stddef.h>

#include "link/message.h"

/* Splits incoming bytes into lines. */
struct kp_frames {
    size_t used;
    char bytes[KP_LINE_MAX_BYTES + 1];
};

/* Called for each whole line, without its end; false: no more of this connection. */
typedef bool kp_line_fn(const char *line, size_t length);

/* Passes on the lines that `count` new bytes at `bytes + used` complete. Returns false if `take` did, or a
 * line is longer than the limit. */
bool kp_frames_receive(struct kp_frames *frames, size_t count, kp_line_fn *take);

/* A descriptor of ours. A program may close descriptors that it does not know, and open a file of its own at
 * the same number: that file must be left alone. */
struct kp_descriptor {
    int fd; /* -1: none */
    unsigned long device, inode; /* of a kind that every file has of its own: all eventfds share one */
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

/* Connects. False: errno says why; EAGAIN: the daemon had no place for a connection for a second. */
bool kp_wire_open(struct kp_wire *wire, const char *path);

/* Return where to write the next line, and the room for it; then call `kp_wire_queue`. */
static inline char *kp_wire_next(struct kp_wire *wire) { return wire->out + wire->unsent; }
static inline size_t kp_wire_room(const struct kp_wire *wire) { return sizeof wire->out - wire->unsent; }
static inline void kp_wire_queue(struct kp_wire *wire, size_t length) { wire->unsent += length; }

bool kp_wire_flush(struct kp_wire *wire);                     /* false: the connection is gone */
bool kp_wire_receive(struct kp_wire *wire, kp_line_fn *take); /* false: likewise, or `take` returned false */

#endif
