/* Runs the fuzz target without libFuzzer: on the corpus as it is, then on pieces of it that are joined and
 * corrupted. The generator has a seed, so that a failure can be reproduced.
 *
 * driver COUNT SEED FILE…
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { INPUTS_MAX = 256, INPUT_MAX_BYTES = 1 << 18, HEAD_BYTES = 65 /* fuzz_link.c's choices */ };
static struct input { uint8_t *data; size_t size; } inputs[INPUTS_MAX];
static size_t input_count;
static uint64_t state;

static uint64_t draw(uint64_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return below ? (state >> 11) % below : 0;
}

/* Runs the target on a copy of exactly the input's size, so that a sanitizer notices a read of one byte too far. */
static void try_it(const uint8_t *data, size_t size) {
    uint8_t *exact = malloc(size ? size : 1);
    if (!exact) abort();
    memcpy(exact, data, size);
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
}

static void add_file(const char *path) {
    FILE *file = fopen(path, "rb");
    struct input *input = &inputs[input_count];
    if (!file || input_count == INPUTS_MAX || !(input->data = malloc(INPUT_MAX_BYTES))) {
        perror(path);
        exit(2);
    }
    input->size = fread(input->data, 1, INPUT_MAX_BYTES, file);
    input_count++;
    fclose(file);
}

static size_t splice(uint8_t *to) {
    size_t size = 0;
    for (uint64_t parts = 1 + draw(4); parts; parts--) {
        const struct input *from = &inputs[draw(input_count)];
        size_t first = size ? HEAD_BYTES + draw(from->size - HEAD_BYTES) : 0, count = from->size - first;
        if (draw(3) == 0) count = draw(count + 1);
        if (count > INPUT_MAX_BYTES - size) count = INPUT_MAX_BYTES - size;
        memcpy(to + size, from->data + first, count);
        size += count;
    }
    return size;
}

static void spoil(uint8_t *data, size_t size) {
    static const char telling[] = "{}[]\",:\\u0 -.eE+\n\0\xC0\xED\xF4tfn";
    for (uint64_t times = draw(8); times && size; times--) {
        size_t at = draw(size), from = draw(size), most = size - (from > at ? from : at);
        switch (draw(4)) {
        case 0: data[at] ^= (uint8_t)(1u << draw(8)); break;
        case 1: data[at] = (uint8_t)draw(256); break;
        case 2: data[at] = (uint8_t)telling[draw(sizeof telling)]; break;
        default: memmove(data + at, data + from, draw(most < 64 ? most : 64));
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 4) return fprintf(stderr, "driver COUNT SEED FILE...\n"), 2;
    unsigned long count = strtoul(argv[1], NULL, 10), done = 0;
    state = (uint64_t)atoll(argv[2]) * 2654435761u + 88172645463325252u;
    for (int i = 3; i < argc; i++) add_file(argv[i]);
    for (size_t i = 0; i < input_count; i++) try_it(inputs[i].data, inputs[i].size);
    uint8_t *made = malloc(INPUT_MAX_BYTES);
    for (; made && done < count; done++) {
        size_t size = splice(made);
        for (size_t i = 0; i < HEAD_BYTES && i < size; i++) made[i] = (uint8_t)draw(256);
        if (size > HEAD_BYTES) spoil(made + HEAD_BYTES, size - HEAD_BYTES);
        try_it(made, size);
    }
    free(made);
    for (size_t i = 0; i < input_count; i++) free(inputs[i].data);
    return printf("%lu inputs\n", done), 0;
}
