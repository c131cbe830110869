/* Room for an allocation: what to do when the driver has no memory left. */
#ifndef KP_ROOM_H
#define KP_ROOM_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kp_room { /* for one allocation; initialise the other members with 0 */
    size_t bytes;      /* approximate: the driver rounds */
    bool asks;         /* the calling thread is inside the gate, and holds nothing that others need */
    bool elsewhere;    /* the memory is on another GPU than the one whose daemon is asked */
    unsigned requests;
    int64_t until_ns, scrubbed_ns;
};

/* Returns whether to try again; called after each try, with its result. If the driver has no memory left, this
 * asks the daemon for room and waits, standing aside: the program's own memory may be paged out meanwhile.
 * False: there is another result, nobody makes room, or the GPU is not so large. */
bool kp_room_again(struct kp_room *room, CUresult result);

#endif
