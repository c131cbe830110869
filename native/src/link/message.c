#include "link/message.h"

#include <string.h>

#include "link/json.h"

enum { NAME_MAX_BYTES = 200, DETAIL_MAX_BYTES = 500 };
#define LENGTH(list) (sizeof(list) / sizeof *(list))

/* ---- received -------------------------------------------------------------------------------- */

static enum kp_action action_of(const char *name) {
    static const char *const names[] = {[KP_DO_HOLD] = "hold", [KP_DO_FREE] = "free",
                                        [KP_DO_PAGE_OUT] = "page-out", [KP_DO_PAGE_IN] = "page-in",
                                        [KP_DO_YIELD] = "yield"};
    for (size_t i = 1; i < LENGTH(names); i++)
        if (!strcmp(name, names[i])) return (enum kp_action)i;
    return KP_DO_OTHER;
}

/* The members that this version reads of each message. */
static const struct member {
    enum kp_message_type what;
    const char *name;
    enum kp_json_kind kind;
    size_t into, room;
    bool needed;
} members[] = {
#define MEMBER(what, name, kind, field, needed)                                                      \
    {KP_MESSAGE_##what, name, KP_JSON_##kind, offsetof(struct kp_message, field),                    \
     sizeof(((struct kp_message *)0)->field), needed}
    MEMBER(WELCOME, "protocol", INTEGER, protocol, true),
    MEMBER(WELCOME, "own", BOOL, own, false),
    MEMBER(WELCOME, "own_why", TEXT, own_why, false),
    MEMBER(ERROR, "code", TEXT, code, true),
    MEMBER(ERROR, "message", TEXT, text, true),
    MEMBER(ERROR, "remedy", TEXT, remedy, false),
    MEMBER(ERROR, "fatal", BOOL, fatal, false),
    MEMBER(GATE, "open", BOOL, open, true),
    MEMBER(DO, "op", INTEGER, op, true),
    MEMBER(DO, "action", TEXT, action_name, true),
    MEMBER(DO, "within_ns", INTEGER, within_ns, true),
    MEMBER(ROOM, "request", INTEGER, request, true),
    MEMBER(ROOM, "granted", BOOL, granted, true),
    MEMBER(ROOM, "remedy", TEXT, remedy, false),
    MEMBER(LIMITS, "arena_bytes", INTEGER, arena_bytes, true),
    MEMBER(LIMITS, "ahead", BOOL, ahead, false),
#undef MEMBER
};

static bool read_members(const char *line, size_t length, struct kp_message *m) {
    struct kp_json_field fields[LENGTH(members)];
    bool needed[LENGTH(members)];
    size_t count = 0;
    for (const struct member *one = members; one < members + LENGTH(members); one++) {
        if (one->what != m->what) continue;
        needed[count] = one->needed;
        fields[count++] = (struct kp_json_field){one->name, one->kind, (char *)m + one->into, one->room, false};
    }
    if (!kp_json_read(line, length, fields, count)) return false;
    for (size_t i = 0; i < count; i++) {
        if (needed[i] && !fields[i].found) return false;
        if (fields[i].into == &m->own) m->says_own = fields[i].found;
    }
    m->action = action_of(m->action_name);
    return m->op >= 0 && m->arena_bytes >= -1;
}

void kp_message_read(const char *line, size_t length, struct kp_message *m) {
    static const struct {
        const char *type;
        enum kp_message_type what;
    } kinds[] = {{"welcome", KP_MESSAGE_WELCOME}, {"error", KP_MESSAGE_ERROR}, {"gate", KP_MESSAGE_GATE},
                 {"pager-do", KP_MESSAGE_DO},     {"room", KP_MESSAGE_ROOM},   {"pong", KP_MESSAGE_PONG},
                 {"pager-limits", KP_MESSAGE_LIMITS}};
    char type[64] = "";
    struct kp_json_field tag[] = {{"type", KP_JSON_TEXT, type, sizeof type, false}};
    memset(m, 0, sizeof *m);
    if (!kp_json_read(line, length, tag, 1) || !tag->found) return;
    m->what = KP_MESSAGE_OTHER;
    for (size_t i = 0; i < LENGTH(kinds); i++)
        if (!strcmp(type, kinds[i].type)) m->what = kinds[i].what;
    if (!read_members(line, length, m)) m->what = KP_MESSAGE_GARBAGE;
}

/* ---- sent ------------------------------------------------------------------------------------ */

size_t kp_write_hello(char *line, size_t room, const char *client, const char *name, bool owns, bool could_own) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", "hello", SIZE_MAX);
    kp_json_integer(&out, "protocol", KP_PROTOCOL);
    kp_json_text(&out, "role", "pager", SIZE_MAX);
    kp_json_text(&out, "client", client, NAME_MAX_BYTES);
    kp_json_text(&out, "name", name, NAME_MAX_BYTES);
    kp_json_bool(&out, "owns", owns);
    kp_json_bool(&out, "could_own", could_own);
    return kp_json_end(&out, line);
}

size_t kp_write_state(char *line, size_t room, const struct kp_report *report) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", "pager-state", SIZE_MAX);
    kp_json_text(&out, "state", report->state, SIZE_MAX);
    kp_json_integer(&out, "resident_bytes", report->resident);
    kp_json_integer(&out, "paged_out_bytes", report->out);
    kp_json_integer(&out, "arena_bytes", report->arena);
    kp_json_integer(&out, "unowned_bytes", report->unowned);
    kp_json_integer(&out, "held_bytes", report->held);
    kp_json_integer(&out, "peak_bytes", report->peak);
    if (report->lacked) kp_json_integer(&out, "lacked_bytes", report->lacked);
    if (report->ipc_refused) kp_json_integer(&out, "ipc_refused", report->ipc_refused);
    kp_json_open(&out, "unowned");
    for (size_t i = 0; i < report->kinds; i++)
        if (report->counts[i].count) kp_json_integer(&out, report->counts[i].kind, report->counts[i].count);
    kp_json_close(&out);
    return kp_json_end(&out, line);
}

size_t kp_write_done(char *line, size_t room, const struct kp_done *done) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", "pager-done", SIZE_MAX);
    kp_json_integer(&out, "op", (uint64_t)done->op);
    kp_json_text(&out, "outcome", done->outcome, SIZE_MAX);
    kp_json_text(&out, "reason", done->reason, NAME_MAX_BYTES);
    kp_json_text(&out, "detail", done->detail, DETAIL_MAX_BYTES);
    kp_json_integer(&out, "bytes", done->bytes);
    kp_json_integer(&out, "elapsed_ns", (uint64_t)done->elapsed_ns);
    return kp_json_end(&out, line);
}

static size_t write_type_only(char *line, size_t room, const char *type) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", type, SIZE_MAX);
    return kp_json_end(&out, line);
}

size_t kp_write_ping(char *line, size_t room) { return write_type_only(line, room, "ping"); }

size_t kp_write_want_lease(char *line, size_t room, const char *field, bool value) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", "want-lease", SIZE_MAX);
    if (field) kp_json_bool(&out, field, value);
    return kp_json_end(&out, line);
}

size_t kp_write_want_room(char *line, size_t room, uint64_t request, uint64_t bytes) {
    struct kp_json_out out;
    kp_json_begin(&out, line, room);
    kp_json_text(&out, "type", "want-room", SIZE_MAX);
    kp_json_integer(&out, "request", request);
    kp_json_integer(&out, "bytes", bytes);
    return kp_json_end(&out, line);
}
