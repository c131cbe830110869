#define _GNU_SOURCE
#include "link/place.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_directory(const char *path) {
    struct stat found;
    return !stat(path, &found) && S_ISDIR(found.st_mode);
}

static const char *set(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* Returns the first of these directories that can be written to, as Python's tempfile does. */
static const char *temporary(void) {
    const char *choices[] = {set("TMPDIR"), set("TEMP"), set("TMP"), "/tmp", "/var/tmp", "/usr/tmp"};
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        if (choices[i] && is_directory(choices[i]) && !access(choices[i], W_OK | X_OK)) return choices[i];
    return ".";
}

bool kp_place_directory(char *directory, size_t room) {
    const char *runtime = set("XDG_RUNTIME_DIR"), *named = set("KIWI_SOCKET_DIR");
    int length;
    if (named) length = snprintf(directory, room, "%s", named);
    else if (is_directory("/run/kiwi")) length = snprintf(directory, room, "/run/kiwi");
    else if (runtime) length = snprintf(directory, room, "%s/kiwi", runtime);
    else length = snprintf(directory, room, "%s/kiwi-%u", temporary(), (unsigned)getuid());
    return length > 0 && (size_t)length < room;
}

/* Reads the start of a small file of /proc; returns "" if it cannot be read. */
static const char *read_start(const char *path, char *text, size_t room) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t count = fd < 0 ? -1 : read(fd, text, room - 1);
    if (fd >= 0) close(fd);
    text[count < 0 ? 0 : count] = 0;
    return text;
}

/* Returns whether this process is in a user namespace that may hide users of the machine. */
static bool hides_users(void) {
    char map[256];
    unsigned inside, outside, count;
    if (sscanf(read_start("/proc/self/uid_map", map, sizeof map), "%u %u %u", &inside, &outside, &count) != 3)
        return false;
    return inside || outside || count != UINT_MAX;
}

static bool is_read_only(const char *options) {
    return !strncmp(options, "ro", 2) && (!options[2] || options[2] == ',');
}

enum { PLACE_MAX = 128 }; /* a socket's path has at most 108 bytes, and a longer mount point is another one */

/* Returns whether the open directory `fd` is the top of a read-only mount. A path with a blank is escaped in
 * mountinfo, and never the same. */
static bool is_read_only_mount(int fd) {
    char name[64], text[512], path[PLACE_MAX], point[PLACE_MAX], options[256], *line = NULL;
    int wanted, id;
    snprintf(name, sizeof name, "/proc/self/fdinfo/%d", fd);
    const char *found = strstr(read_start(name, text, sizeof text), "mnt_id:");
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (!found || length < 0 || sscanf(found, "mnt_id: %d", &wanted) != 1) return false;
    path[length] = 0;
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    if (!mounts) return false;
    size_t room = 0;
    bool good = false;
    while (!good && getline(&line, &room, mounts) > 0)
        good = sscanf(line, "%d %*s %*s %*s %127s %255s", &id, point, options) == 3 && id == wanted &&
               !strcmp(point, path) && is_read_only(options);
    free(line);
    fclose(mounts);
    return good;
}

/* Returns whether `uid` stands for all hidden users, and the directory `fd` was handed in: only the starter
 * of a container and its root can mount something in it. */
static bool is_handed_in(uid_t uid, int fd) {
    char text[32];
    unsigned overflow;
    if (sscanf(read_start("/proc/sys/kernel/overflowuid", text, sizeof text), "%u", &overflow) != 1) return false;
    return uid == overflow && hides_users() && is_read_only_mount(fd);
}

/* Returns whether this process may trust user `uid` in all that concerns the open directory `fd`. */
static bool is_trusted(uid_t uid, int fd) { return uid == 0 || uid == getuid() || is_handed_in(uid, fd); }

static bool is_safe(const struct stat *place, int fd) {
    return S_ISDIR(place->st_mode) && is_trusted(place->st_uid, fd) && !(place->st_mode & (S_IWGRP | S_IWOTH));
}

/* Follows no link: any user may put a link into the temporary directory. */
static int open_directory(const char *path) { return open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }

enum kp_trust kp_place_trusted(const char *directory, const char *name) {
    struct stat place, found;
    int fd = open_directory(directory);
    if (fd < 0) return errno == ENOTDIR || errno == ELOOP ? KP_TRUST_NO : KP_TRUST_NONE_THERE;
    bool there = !fstat(fd, &place) && !fstatat(fd, name, &found, AT_SYMLINK_NOFOLLOW);
    bool good = there && is_safe(&place, fd) && S_ISSOCK(found.st_mode) && is_trusted(found.st_uid, fd);
    close(fd);
    if (!there) return KP_TRUST_NONE_THERE;
    return good ? KP_TRUST_YES : KP_TRUST_NO;
}

bool kp_place_peer_trusted(int fd, const char *path) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size)) return false;
    char directory[PLACE_MAX];
    const char *name = strrchr(path, '/');
    snprintf(directory, sizeof directory, "%.*s", name ? (int)(name - path) : 0, path);
    int place = open_directory(directory);
    bool good = is_trusted(peer.uid, place);
    if (place >= 0) close(place);
    return good;
}

void kp_place_uuid(const unsigned char b[16], char *text) {
    snprintf(text, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}
