#define _GNU_SOURCE
#include "link/wire.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "link/place.h"

enum { CONNECT_S = 1 }; /* a working daemon accepts within milliseconds; an exit should not wait longer than this */

struct kp_descriptor kp_descriptor(int fd) {
    struct stat found;
    if (fd < 0 || fstat(fd, &found)) return (struct kp_descriptor){.fd = fd};
    return (struct kp_descriptor){fd, found.st_dev, found.st_ino};
}

bool kp_descriptor_is_ours(const struct kp_descriptor *d) {
    struct stat found;
    return d->fd >= 0 && !fstat(d->fd, &found) && found.st_dev == d->device && found.st_ino == d->inode;
}

void kp_descriptor_close(struct kp_descriptor *d) {
    if (kp_descriptor_is_ours(d)) close(d->fd);
    d->fd = -1;
}

bool kp_frames_receive(struct kp_frames *frames, size_t count, kp_line_fn *take) {
    char *line = frames->bytes, *end = frames->bytes + frames->used + count, *stop;
    char *unseen = frames->bytes + frames->used; /* no line ends before it */
    while ((stop = memchr(unseen, '\n', (size_t)(end - unseen)))) {
        if (!take(line, (size_t)(stop - line))) return false;
        line = unseen = stop + 1;
    }
    frames->used = (size_t)(end - line);
    memmove(frames->bytes, line, frames->used);
    return frames->used <= KP_LINE_MAX_BYTES;
}

bool kp_wire_open(struct kp_wire *wire, const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(path);
    if (length >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return false;
    }
    memcpy(address.sun_path, path, length + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    /* The limit also applies to connect(), which waits while the daemon has too many connections to accept, and then
     * fails with EAGAIN. All other calls use MSG_DONTWAIT. */
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){.tv_sec = CONNECT_S}, sizeof(struct timeval));
    bool connected;
    do { /* EINTR: the program was stopped or frozen meanwhile */
        connected = !connect(fd, (struct sockaddr *)&address, sizeof address);
    } while (!connected && errno == EINTR);
    if (!connected || !kp_place_peer_trusted(fd, path)) {
        int why = connected ? EPERM : errno;
        close(fd);
        errno = why;
        return false;
    }
    wire->unsent = wire->in.used = 0;
    wire->socket = kp_descriptor(fd);
    return true;
}

bool kp_wire_flush(struct kp_wire *wire) {
    while (wire->unsent) {
        if (!kp_descriptor_is_ours(&wire->socket)) return false;
        ssize_t sent = send(wire->socket.fd, wire->out, wire->unsent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) return errno == EAGAIN || errno == EINTR;
        wire->unsent -= (size_t)sent;
        memmove(wire->out, wire->out + sent, wire->unsent);
    }
    return true;
}

bool kp_wire_receive(struct kp_wire *wire, kp_line_fn *take) {
    struct kp_frames *in = &wire->in;
    if (!kp_descriptor_is_ours(&wire->socket)) return false;
    ssize_t count = recv(wire->socket.fd, in->bytes + in->used, sizeof in->bytes - in->used, MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    return count > 0 && kp_frames_receive(in, (size_t)count, take);
}
