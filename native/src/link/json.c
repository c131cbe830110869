#include "link/json.h"

#include <string.h>

enum { DEPTH_MAX = 16, NAME_ROOM = 64 };
static const int64_t INTEGER_LIMIT = (int64_t)1 << 53;
static const unsigned char NO_CHARACTER[] = "\xEF\xBF\xBD"; /* U+FFFD */

struct reader {
    const unsigned char *at, *end;
};

/* The destination of decoded text; `room` includes the final NUL, and is 0 if nobody wants the text. */
struct sink {
    char *to;
    size_t used, room;
    bool cut;
};

/* ---- characters ------------------------------------------------------------------------------ */

/* Follows the Unicode standard, table 3-7. */
size_t kp_utf8_character(const unsigned char *p, const unsigned char *end) {
    size_t length = *p < 0x80 ? 1 : *p < 0xC2 ? 0 : *p < 0xE0 ? 2 : *p < 0xF0 ? 3 : *p < 0xF5 ? 4 : 0;
    if (length == 0 || (size_t)(end - p) < length) return 0;
    for (size_t i = 1; i < length; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if ((*p == 0xE0 && p[1] < 0xA0) || (*p == 0xED && p[1] > 0x9F)) return 0;
    if ((*p == 0xF0 && p[1] < 0x90) || (*p == 0xF4 && p[1] > 0x8F)) return 0;
    return length;
}

static size_t utf8(uint32_t code, unsigned char b[4]) {
    if (code < 0x80) {
        b[0] = (unsigned char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, code >>= 6) b[i] = (unsigned char)(0x80 | (code & 0x3F));
    b[0] = (unsigned char)((length == 2 ? 0xC0 : length == 3 ? 0xE0 : 0xF0) | code);
    return length;
}

static void put(struct sink *sink, const unsigned char *bytes, size_t length) {
    if (sink->cut || sink->room == 0) return;
    sink->cut = length > sink->room - 1 - sink->used;
    if (sink->cut) return;
    memcpy(sink->to + sink->used, bytes, length);
    sink->used += length;
}

/* ---- reading --------------------------------------------------------------------------------- */

static void skip_space(struct reader *r) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\r' || *r->at == '\n')) r->at++;
}

static bool take(struct reader *r, unsigned char c) {
    if (r->at == r->end || *r->at != c) return false;
    r->at++;
    return true;
}

static bool take_word(struct reader *r, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(r->end - r->at) < length || memcmp(r->at, word, length)) return false;
    r->at += length;
    return true;
}

static bool take_hex4(struct reader *r, uint32_t *code) {
    if (r->end - r->at < 4) return false;
    *code = 0;
    for (const unsigned char *stop = r->at + 4; r->at < stop; r->at++) {
        unsigned char c = *r->at, letter = c | 0x20;
        if (c >= '0' && c <= '9') *code = *code << 4 | (uint32_t)(c - '0');
        else if (letter >= 'a' && letter <= 'f') *code = *code << 4 | (uint32_t)(letter - 'a' + 10);
        else return false;
    }
    return true;
}

/* Reads what follows the backslash and the u: four digits, or the two halves of a surrogate pair. */
static bool take_code(struct reader *r, struct sink *sink) {
    uint32_t code, low;
    unsigned char bytes[4];
    if (!take_hex4(r, &code) || (code >= 0xDC00 && code < 0xE000)) return false;
    if (code >= 0xD800 && code < 0xDC00) {
        if (!take_word(r, "\\u") || !take_hex4(r, &low) || low < 0xDC00 || low > 0xDFFF) return false;
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code == 0) put(sink, NO_CHARACTER, 3); /* a NUL would end the text early */
    else put(sink, bytes, utf8(code, bytes));
    return true;
}

static bool take_escape(struct reader *r, struct sink *sink) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (r->at == r->end) return false;
    unsigned char c = *r->at++;
    if (c == 'u') return take_code(r, sink);
    const char *found = c ? strchr(names, c) : NULL;
    if (!found) return false;
    put(sink, (const unsigned char *)&values[found - names], 1);
    return true;
}

static bool take_text(struct reader *r, struct sink *sink) {
    if (!take(r, '"')) return false;
    while (r->at < r->end && *r->at != '"') {
        if (*r->at == '\\') {
            r->at++;
            if (!take_escape(r, sink)) return false;
            continue;
        }
        size_t length = *r->at < 0x20 ? 0 : kp_utf8_character(r->at, r->end);
        if (length == 0) return false;
        put(sink, r->at, length);
        r->at += length;
    }
    if (sink->room) sink->to[sink->used] = 0;
    return take(r, '"');
}

struct number {
    bool negative, exact; /* exact: an integer, and `digits` is all of it */
    uint64_t digits;
};

static bool take_digits(struct reader *r, struct number *n) {
    const unsigned char *first = r->at;
    for (; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++) {
        if (n->digits < UINT64_MAX / 10 - 1) n->digits = n->digits * 10 + (*r->at - '0');
        else n->exact = false;
    }
    return r->at > first;
}

static bool take_fraction(struct reader *r, struct number *n) {
    if (!take(r, '.')) return true;
    n->exact = false;
    return take_digits(r, n);
}

static bool take_exponent(struct reader *r, struct number *n) {
    if (!take(r, 'e') && !take(r, 'E')) return true;
    n->exact = false;
    if (!take(r, '-')) take(r, '+');
    return take_digits(r, n);
}

static bool take_number(struct reader *r, struct number *n) {
    *n = (struct number){.exact = true};
    n->negative = take(r, '-');
    bool zero = r->at < r->end && *r->at == '0';
    const unsigned char *first = r->at;
    if (!take_digits(r, n) || (zero && r->at - first > 1)) return false;
    return take_fraction(r, n) && take_exponent(r, n);
}

static bool skip_value(struct reader *r, int depth);

static bool skip_list(struct reader *r, int depth) {
    r->at++;
    skip_space(r);
    if (take(r, ']')) return true;
    do {
        if (!skip_value(r, depth + 1)) return false;
    } while (take(r, ','));
    return take(r, ']');
}

static bool read_object(struct reader *r, struct kp_json_field *fields, size_t count, int depth);

static bool skip_value(struct reader *r, int depth) {
    struct sink nowhere = {0};
    struct number number;
    bool good;
    skip_space(r);
    if (depth > DEPTH_MAX || r->at == r->end) return false;
    switch (*r->at) {
    case '{': good = read_object(r, NULL, 0, depth); break;
    case '[': good = skip_list(r, depth); break;
    case '"': good = take_text(r, &nowhere); break;
    case 't': good = take_word(r, "true"); break;
    case 'f': good = take_word(r, "false"); break;
    case 'n': good = take_word(r, "null"); break;
    default: good = take_number(r, &number);
    }
    skip_space(r);
    return good;
}

static bool take_field(struct reader *r, struct kp_json_field *field) {
    struct sink sink = {field->into, 0, field->room, false};
    struct number n;
    switch (field->kind) {
    case KP_JSON_TEXT: return take_text(r, &sink);
    case KP_JSON_BOOL:
        *(bool *)field->into = r->at < r->end && *r->at == 't';
        return take_word(r, "true") || take_word(r, "false");
    case KP_JSON_INTEGER:
        if (!take_number(r, &n) || !n.exact || n.digits >= (uint64_t)INTEGER_LIMIT) return false;
        *(int64_t *)field->into = n.negative ? -(int64_t)n.digits : (int64_t)n.digits;
        return true;
    }
    return false;
}

static struct kp_json_field *wanted(struct kp_json_field *fields, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (!strcmp(fields[i].name, name)) return &fields[i];
    return NULL;
}

static bool read_member(struct reader *r, struct kp_json_field *fields, size_t count, int depth) {
    char name[NAME_ROOM] = "";
    struct sink sink = {name, 0, count ? sizeof name : 0, false};
    skip_space(r);
    if (!take_text(r, &sink)) return false;
    skip_space(r);
    if (!take(r, ':')) return false;
    struct kp_json_field *field = sink.cut ? NULL : wanted(fields, count, name);
    if (!field) return skip_value(r, depth + 1);
    skip_space(r);
    if (!take_field(r, field)) return false;
    field->found = true;
    skip_space(r);
    return true;
}

static bool read_object(struct reader *r, struct kp_json_field *fields, size_t count, int depth) {
    r->at++;
    skip_space(r);
    if (take(r, '}')) return true;
    do {
        if (!read_member(r, fields, count, depth)) return false;
    } while (take(r, ','));
    return take(r, '}');
}

bool kp_json_read(const char *text, size_t length, struct kp_json_field *fields, size_t count) {
    struct reader r = {(const unsigned char *)text, (const unsigned char *)text + length};
    for (size_t i = 0; i < count; i++) fields[i].found = false;
    skip_space(&r);
    if (r.at == r.end || *r.at != '{' || !read_object(&r, fields, count, 0)) return false;
    skip_space(&r);
    return r.at == r.end;
}
