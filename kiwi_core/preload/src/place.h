/* Where the daemon of a GPU listens, and whether what is there can be trusted: the same rules as
 * kiwi_core.config.socket_dir and kiwi_core.client.directory. */
#ifndef KP_PLACE_H
#define KP_PLACE_H

#include <stdbool.h>
#include <stddef.h>

/* The directory of the sockets, by the environment as it is now; false: its name is longer than `room`. */
bool kp_place_directory(char *directory, size_t room);

enum kp_trust {
    KP_TRUST_NONE_THERE, /* no such directory or socket */
    KP_TRUST_NO,         /* others could have put it there, or it is not a socket */
    KP_TRUST_YES,
};

/* `name` is a socket in `directory`. Another user's could order this process about, so both belong to
 * root or to this user, and nobody else can write to the directory. */
enum kp_trust kp_place_trusted(const char *directory, const char *name);

/* Who listens at the other end of the connected socket `fd`, by the system's word: root, or this user? */
bool kp_place_peer_trusted(int fd);

/* "GPU-5d0c…" as the driver and NVML write it; `text` has room for 41 bytes. */
void kp_place_uuid(const unsigned char bytes[16], char *text);

#endif
