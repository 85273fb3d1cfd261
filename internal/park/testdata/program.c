/* SPDX-License-Identifier: Apache-2.0 */

/* program LIBRARY MIB: has so much memory of the first GPU, and words in it that it checks and changes all
 * the time. It says "ready PID", and when its input ends how often it was right. */
#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { WORDS = 8 };

static void *library;
#define CALL(name, ...)                                                     \
    do {                                                                    \
        int r_ = ((int (*)())dlsym(library, #name))(__VA_ARGS__);           \
        if (r_) {                                                           \
            printf("failed: %s answers %d\n", #name, r_);                   \
            exit(3);                                                        \
        }                                                                   \
    } while (0)

int main(int argc, char **argv)
{
    void *context;
    uint64_t at, want[WORDS], got, dice = (uint64_t)getpid() * 2654435761u;
    unsigned long rounds = 0;
    if (argc != 3 || !(library = dlopen(argv[1], RTLD_NOW)))
        return 2;
    size_t size = (size_t)atol(argv[2]) << 20;
    setvbuf(stdout, NULL, _IOLBF, 0);
    CALL(cuInit, 0);
    CALL(cuCtxCreate_v2, &context, 0, 0);
    CALL(cuMemAlloc_v2, &at, size);
    for (int i = 0; i < WORDS; i++) {
        want[i] = dice = dice * 6364136223846793005u + 1442695040888963407u;
        CALL(cuMemcpyHtoD_v2, at + (uint64_t)i * (size / WORDS), &want[i], (size_t)8);
    }
    printf("ready %d\n", getpid());
    for (struct pollfd in = {.fd = 0, .events = POLLIN}; poll(&in, 1, 1) == 0; rounds++)
        for (int i = 0; i < WORDS; i++) {
            uint64_t place = at + (uint64_t)i * (size / WORDS);
            CALL(cuMemcpyDtoH_v2, &got, place, (size_t)8);
            if (got != want[i]) {
                printf("wrong: %llx, want %llx\n", (unsigned long long)got, (unsigned long long)want[i]);
                return 4;
            }
            want[i] = dice = dice * 6364136223846793005u + 1442695040888963407u;
            CALL(cuMemcpyHtoD_v2, place, &want[i], (size_t)8);
        }
    printf("right %lu\n", rounds);
    return 0;
}
