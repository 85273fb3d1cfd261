/* SPDX-License-Identifier: Apache-2.0 */

/* linked REAL: a program that was linked against libcuda.so.1 and names all of its
 * functions, which linked.h lists: NAME(symbol). It prints whose each of them is. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "alone.h"

#define NAME(symbol) extern char symbol[];
#include "linked.h"
#undef NAME

static const struct {
    const char *name;
    char *at;
} names[] = {
#define NAME(symbol) {#symbol, symbol},
#include "linked.h"
};

int main(int argc, char **argv)
{
    void *real = argc == 2 && alone() == 0 ? dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (!real) {
        printf("FAILED: %s\n", argc == 2 ? dlerror() : "arguments");
        return 1;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *at = names[i].at;
        printf("%s %s\n", names[i].name, !at ? "none" : at == dlsym(real, names[i].name) ? "real" : "cap");
    }
    return 0;
}
