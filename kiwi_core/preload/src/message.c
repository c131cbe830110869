#include "message.h"

#include <string.h>

#include "json.h"

enum { NAME_MAX_BYTES = 200, DETAIL_MAX_BYTES = 500 };
#define LENGTH(list) (sizeof(list) / sizeof *(list))

/* ---- heard ----------------------------------------------------------------------------------- */

static bool all_found(const struct kp_json_field *fields, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!fields[i].found) return false;
    return true;
}

static enum kp_action action_of(const char *name) {
    static const char *const names[] = {[KP_DO_HOLD] = "hold", [KP_DO_FREE] = "free",
                                        [KP_DO_PAGE_OUT] = "page-out", [KP_DO_PAGE_IN] = "page-in",
                                        [KP_DO_YIELD] = "yield"};
    for (size_t i = 1; i < LENGTH(names); i++)
        if (!strcmp(name, names[i])) return (enum kp_action)i;
    return KP_DO_OTHER;
}

static enum kp_heard read_welcome(const char *line, size_t length, struct kp_message *m) {
    struct kp_json_field fields[] = {{"protocol", KP_JSON_INTEGER, &m->protocol, 0, false}};
    bool good = kp_json_read(line, length, fields, LENGTH(fields)) && all_found(fields, LENGTH(fields));
    return good ? KP_HEARD_WELCOME : KP_HEARD_GARBAGE;
}

static enum kp_heard read_error(const char *line, size_t length, struct kp_message *m) {
    struct kp_json_field fields[] = {
        {"code", KP_JSON_TEXT, m->code, sizeof m->code, false},
        {"message", KP_JSON_TEXT, m->text, sizeof m->text, false},
        {"remedy", KP_JSON_TEXT, m->remedy, sizeof m->remedy, false},
        {"fatal", KP_JSON_BOOL, &m->fatal, 0, false},
    };
    bool good = kp_json_read(line, length, fields, LENGTH(fields)) && all_found(fields, 2);
    return good ? KP_HEARD_ERROR : KP_HEARD_GARBAGE;
}

static enum kp_heard read_gate(const char *line, size_t length, struct kp_message *m) {
    struct kp_json_field fields[] = {{"open", KP_JSON_BOOL, &m->open, 0, false}};
    bool good = kp_json_read(line, length, fields, LENGTH(fields)) && all_found(fields, LENGTH(fields));
    return good ? KP_HEARD_GATE : KP_HEARD_GARBAGE;
}

static enum kp_heard read_do(const char *line, size_t length, struct kp_message *m) {
    char action[32] = "";
    struct kp_json_field fields[] = {
        {"op", KP_JSON_INTEGER, &m->op, 0, false},
        {"action", KP_JSON_TEXT, action, sizeof action, false},
        {"within_s", KP_JSON_SECONDS, &m->within_ns, 0, false},
        {"bytes", KP_JSON_INTEGER, &m->bytes, 0, false}, /* not from every daemon */
    };
    bool good = kp_json_read(line, length, fields, LENGTH(fields)) && all_found(fields, 3);
    m->action = action_of(action);
    return good && m->op >= 0 && m->bytes >= 0 ? KP_HEARD_DO : KP_HEARD_GARBAGE;
}

static enum kp_heard read_room(const char *line, size_t length, struct kp_message *m) {
    struct kp_json_field fields[] = {
        {"request", KP_JSON_INTEGER, &m->request, 0, false},
        {"granted", KP_JSON_BOOL, &m->granted, 0, false},
        {"detail", KP_JSON_TEXT, m->text, sizeof m->text, false},
    };
    bool good = kp_json_read(line, length, fields, LENGTH(fields)) && all_found(fields, 2);
    return good ? KP_HEARD_ROOM : KP_HEARD_GARBAGE;
}

static enum kp_heard read_limits(const char *line, size_t length, struct kp_message *m) {
    struct kp_json_field fields[] = {
        {"arena_bytes", KP_JSON_INTEGER, &m->arena_bytes, 0, false},
    };
    bool good = kp_json_read(line, length, fields, LENGTH(fields)) && all_found(fields, LENGTH(fields));
    return good && m->arena_bytes >= -1 ? KP_HEARD_LIMITS : KP_HEARD_GARBAGE;
}

static enum kp_heard read_pong(const char *line, size_t length, struct kp_message *m) {
    (void)line, (void)length, (void)m;
    return KP_HEARD_PONG;
}

void kp_message_read(const char *line, size_t length, struct kp_message *m) {
    static const struct {
        const char *type;
        enum kp_heard (*read)(const char *, size_t, struct kp_message *);
    } kinds[] = {{"welcome", read_welcome}, {"error", read_error}, {"gate", read_gate},
                 {"pager-do", read_do},     {"room", read_room},   {"pong", read_pong},
                 {"pager-limits", read_limits}};
    char type[64] = "";
    struct kp_json_field tag[] = {{"type", KP_JSON_TEXT, type, sizeof type, false}};
    memset(m, 0, sizeof *m);
    if (!kp_json_read(line, length, tag, 1) || !tag->found) return;
    m->what = KP_HEARD_OTHER;
    for (size_t i = 0; i < LENGTH(kinds); i++)
        if (!strcmp(type, kinds[i].type)) m->what = kinds[i].read(line, length, m);
}

/* ---- said ------------------------------------------------------------------------------------ */

size_t kp_say_hello(char *line, size_t room, const char *client, const char *name, bool owns) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", "hello", SIZE_MAX);
    kp_json_integer(&out, "protocol", KP_PROTOCOL);
    kp_json_text(&out, "role", "pager", SIZE_MAX);
    kp_json_text(&out, "client", client, NAME_MAX_BYTES);
    kp_json_text(&out, "name", name, NAME_MAX_BYTES);
    kp_json_bool(&out, "owns", owns);
    return kp_json_end(&out, line);
}

size_t kp_say_state(char *line, size_t room, const struct kp_report *report) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", "pager-state", SIZE_MAX);
    kp_json_text(&out, "state", report->state, SIZE_MAX);
    kp_json_integer(&out, "resident_bytes", report->resident);
    kp_json_integer(&out, "paged_out_bytes", report->out);
    kp_json_integer(&out, "arena_bytes", report->arena);
    kp_json_integer(&out, "unowned_bytes", report->unowned);
    kp_json_bool(&out, "partial", true); /* this version heeds `bytes` */
    kp_json_open(&out, "unowned");
    for (size_t i = 0; i < report->kinds; i++)
        if (report->counts[i].count) kp_json_integer(&out, report->counts[i].kind, report->counts[i].count);
    kp_json_close(&out);
    return kp_json_end(&out, line);
}

size_t kp_say_done(char *line, size_t room, const struct kp_done *done) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", "pager-done", SIZE_MAX);
    kp_json_integer(&out, "op", (uint64_t)done->op);
    kp_json_text(&out, "outcome", done->outcome, SIZE_MAX);
    kp_json_text(&out, "reason", done->reason, NAME_MAX_BYTES);
    kp_json_text(&out, "detail", done->detail, DETAIL_MAX_BYTES);
    kp_json_integer(&out, "bytes", done->bytes);
    kp_json_seconds(&out, "elapsed_s", done->elapsed_ns);
    return kp_json_end(&out, line);
}

static size_t say_only(char *line, size_t room, const char *type) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", type, SIZE_MAX);
    return kp_json_end(&out, line);
}

size_t kp_say_ping(char *line, size_t room) { return say_only(line, room, "ping"); }
size_t kp_say_want_lease(char *line, size_t room) { return say_only(line, room, "want-lease"); }

size_t kp_say_want_room(char *line, size_t room, uint64_t request, uint64_t bytes) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", "want-room", SIZE_MAX);
    kp_json_integer(&out, "request", request);
    kp_json_integer(&out, "bytes", bytes);
    return kp_json_end(&out, line);
}
