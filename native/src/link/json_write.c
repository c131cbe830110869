#include <string.h>

#include "link/json.h"

static void put(struct kp_json_out *out, const void *bytes, size_t length) {
    out->full = out->full || (size_t)(out->end - out->at) < length;
    if (out->full) return;
    memcpy(out->at, bytes, length);
    out->at += length;
}

static void put_character(struct kp_json_out *out, const unsigned char *p, size_t length) {
    static const char hex[] = "0123456789abcdef";
    char escape[] = {'\\', 'u', '0', '0', hex[*p >> 4], hex[*p & 15]};
    if (*p < 0x20) {
        put(out, escape, sizeof escape);
        return;
    }
    if (*p == '"' || *p == '\\') put(out, "\\", 1);
    put(out, p, length);
}

static void put_text(struct kp_json_out *out, const char *value, size_t max_bytes) {
    const unsigned char *p = (const unsigned char *)value, *end = p + strlen(value);
    const unsigned char *cut = (size_t)(end - p) > max_bytes ? p + max_bytes : end;
    put(out, "\"", 1);
    while (p < cut) {
        size_t length = kp_utf8_character(p, end);
        if (length > (size_t)(cut - p)) break;
        if (length) put_character(out, p, length);
        else put(out, "\xEF\xBF\xBD", 3);
        p += length ? length : 1;
    }
    put(out, "\"", 1);
}

static void put_decimal(struct kp_json_out *out, uint64_t value) {
    char digits[20];
    int at = sizeof digits;
    do digits[--at] = (char)('0' + value % 10);
    while (value /= 10);
    put(out, digits + at, sizeof digits - (size_t)at);
}

static void name_it(struct kp_json_out *out, const char *name) {
    if (out->comma) put(out, ",", 1);
    out->comma = true;
    put_text(out, name, SIZE_MAX);
    put(out, ":", 1);
}

void kp_json_begin(struct kp_json_out *out, char *buffer, size_t room) {
    *out = (struct kp_json_out){.at = buffer, .end = buffer + room};
    put(out, "{", 1);
}

void kp_json_open(struct kp_json_out *out, const char *name) {
    name_it(out, name);
    put(out, "{", 1);
    out->comma = false;
}

void kp_json_close(struct kp_json_out *out) {
    put(out, "}", 1);
    out->comma = true;
}

size_t kp_json_end(struct kp_json_out *out, const char *buffer) {
    put(out, "}\n", 2);
    return out->full ? 0 : (size_t)(out->at - buffer);
}

void kp_json_text(struct kp_json_out *out, const char *name, const char *value, size_t max_bytes) {
    name_it(out, name);
    put_text(out, value, max_bytes);
}

void kp_json_integer(struct kp_json_out *out, const char *name, uint64_t value) {
    name_it(out, name);
    put_decimal(out, value);
}

void kp_json_bool(struct kp_json_out *out, const char *name, bool value) {
    name_it(out, name);
    put(out, value ? "true" : "false", value ? 4 : 5);
}
