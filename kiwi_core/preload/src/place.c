#define _GNU_SOURCE
#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
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

static bool is_trusted(uid_t uid) { return uid == 0 || uid == getuid(); }

static bool is_safe(const struct stat *place) {
    return S_ISDIR(place->st_mode) && is_trusted(place->st_uid) && !(place->st_mode & (S_IWGRP | S_IWOTH));
}

enum kp_trust kp_place_trusted(const char *directory, const char *name) {
    struct stat place, found;
    /* Uses a descriptor and follows no link: any user may put a link into the temporary directory. */
    int fd = open(directory, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno == ENOTDIR || errno == ELOOP ? KP_TRUST_NO : KP_TRUST_NONE_THERE;
    bool there = !fstat(fd, &place) && !fstatat(fd, name, &found, AT_SYMLINK_NOFOLLOW);
    close(fd);
    if (!there) return KP_TRUST_NONE_THERE;
    return is_safe(&place) && S_ISSOCK(found.st_mode) && is_trusted(found.st_uid) ? KP_TRUST_YES : KP_TRUST_NO;
}

bool kp_place_peer_trusted(int fd) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) && is_trusted(peer.uid);
}

void kp_place_uuid(const unsigned char b[16], char *text) {
    snprintf(text, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}
