// SPDX-License-Identifier: Apache-2.0
//
// dlopen-check NAME... loads each library by its name, as a program that uses
// it would, and prints the path of the file that the loader chose.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	if (argc < 2) {
		fprintf(stderr, "usage: dlopen-check NAME...\n");
		return 2;
	}
	for (int i = 1; i < argc; i++) {
		void *handle = dlopen(argv[i], RTLD_NOW);
		struct link_map *map;
		char path[PATH_MAX];

		if (handle == NULL || dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) {
			fprintf(stderr, "dlopen-check: %s\n", dlerror());
			return 1;
		}
		/* The link map has the name as it was found; a library's usual
		 * name is a link to the file that counts. */
		if (realpath(map->l_name, path) == NULL) {
			perror(map->l_name);
			return 1;
		}
		printf("%s => %s\n", argv[i], path);
	}
	return 0;
}
