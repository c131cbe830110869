/* Room for an allocation: what to do when the driver has none left. */
#ifndef KP_ROOM_H
#define KP_ROOM_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kp_room { /* for one allocation; what is not named is 0 */
    size_t bytes;      /* about: the driver rounds */
    bool asks;         /* the calling thread is inside the gate, and holds nothing that others need */
    bool elsewhere;    /* on another GPU than the one whose daemon is asked */
    unsigned requests;
    int64_t until_ns, scrubbed_ns;
};

/* After each try, with its result. True: try again. Where the driver has no memory left, it asks the daemon
 * for room first and waits for it, standing aside: what the program owns may be paged out meanwhile. False:
 * there is another result, nobody makes room, or no GPU is so large. */
bool kp_room_again(struct kp_room *room, CUresult result);

#endif
