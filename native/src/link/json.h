/* The link's JSON: one object per line, read strictly and written without allocating.
 *
 * The text to read comes from outside: it may be any bytes, which are accepted or refused. All numbers that
 * are read or written are integers.
 */
#ifndef KP_JSON_H
#define KP_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum kp_json_kind {
    KP_JSON_TEXT,    /* into: char[room]; a longer text is cut between two characters */
    KP_JSON_INTEGER, /* into: int64_t; the absolute value is below 2^53 */
    KP_JSON_BOOL,    /* into: bool */
};

/* A member that the caller wants. `into` is written only if the object has the member. */
struct kp_json_field {
    const char *name; /* below 64 bytes */
    enum kp_json_kind kind;
    void *into;
    size_t room;
    bool found;
};

/* Reads the object that is all of `text`, and those of its members that `fields` names; checks and skips the
 * others. Returns false if `text` is not JSON, or a wanted member is of another kind. */
bool kp_json_read(const char *text, size_t length, struct kp_json_field *fields, size_t count);

/* Returns the length in bytes of the UTF-8 character at `p`, which is before `end`; 0: there is none. */
size_t kp_utf8_character(const unsigned char *p, const unsigned char *end);

/* A line that is being written (json_write.c). Once the line does not fit, `full` is set and stays set. */
struct kp_json_out {
    char *at, *end;
    bool comma, full;
};

void kp_json_begin(struct kp_json_out *out, char *buffer, size_t room);
void kp_json_open(struct kp_json_out *out, const char *name); /* opens a nested object */
void kp_json_close(struct kp_json_out *out);
size_t kp_json_end(struct kp_json_out *out, const char *buffer); /* returns the line's bytes; 0: it is full */
/* Writes a text. Invalid UTF-8 in `value` becomes U+FFFD; a text above `max_bytes` is cut between two
 * characters. */
void kp_json_text(struct kp_json_out *out, const char *name, const char *value, size_t max_bytes);
void kp_json_integer(struct kp_json_out *out, const char *name, uint64_t value);
void kp_json_bool(struct kp_json_out *out, const char *name, bool value);

#endif
