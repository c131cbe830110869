/* The socket of a GPU's daemon, and whether it can be trusted: the same rules as in
 * kiwi_core.config.socket_dir and kiwi_core.client.directory. */
#ifndef KP_PLACE_H
#define KP_PLACE_H

#include <stdbool.h>
#include <stddef.h>

/* Gets the directory of the sockets, by the current environment; false: its name is longer than `room`. */
bool kp_place_directory(char *directory, size_t room);

enum kp_trust {
    KP_TRUST_NONE_THERE, /* no such directory or socket */
    KP_TRUST_NO,         /* another user could have put it there, or it is not a socket */
    KP_TRUST_YES,
};

/* Returns whether the socket `name` in `directory` can be trusted. Another user's socket could give orders to
 * this process, so both must belong to root or to this user, and nobody else may write to the directory. A
 * user namespace hides which user outside is root; there a read-only mount of the directory stands for root. */
enum kp_trust kp_place_trusted(const char *directory, const char *name);

/* Returns whether the system says that root or this user listens at the other end of the socket `fd`, which is
 * connected to `path`. */
bool kp_place_peer_trusted(int fd, const char *path);

/* Writes "GPU-5d0c…", as the driver and NVML do; `text` has room for 41 bytes. */
void kp_place_uuid(const unsigned char bytes[16], char *text);

#endif
