// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// core-cookies ID...: the core scheduling cookie of each of these threads, a line for each; 0 is none.
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>

#ifndef PR_SCHED_CORE
#define PR_SCHED_CORE 62
#endif
#define GET 0
#define ONE_THREAD 0

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		unsigned long long cookie = 0;

		if (prctl(PR_SCHED_CORE, GET, atoi(argv[i]), ONE_THREAD, &cookie)) {
			perror(argv[i]);
			return 1;
		}
		printf("%llx\n", cookie);
	}
	return 0;
}
