/* Preloaded beside the library: if the other end closes a connection at once, the connection is closed before
 * connect() returns. Other connections take a second. */
#define _GNU_SOURCE
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    if (syscall(SYS_connect, fd, address, length)) return -1;
    struct pollfd hung_up = {.fd = fd}; /* poll() always reports POLLHUP */
    if (address->sa_family == AF_UNIX) poll(&hung_up, 1, 1000);
    return 0;
}
