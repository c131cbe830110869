/* Preloaded beside the library: a connection that the other end closes at once is closed before connect()
 * returns. Others take a second. */
#define _GNU_SOURCE
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    if (syscall(SYS_connect, fd, address, length)) return -1;
    struct pollfd hung_up = {.fd = fd}; /* POLLHUP is told without being asked for */
    if (address->sa_family == AF_UNIX) poll(&hung_up, 1, 1000);
    return 0;
}
