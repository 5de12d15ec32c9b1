// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// hold-fd PID NAME: takes a duplicate of a descriptor of another process, the first whose link is NAME, says
// so, and holds it until it is killed. What a VMM could pass on to any process.
#define _GNU_SOURCE
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	char path[64], link[256];
	struct dirent *entry;
	DIR *dir;
	int pid, pidfd;

	if (argc != 3)
		return 2;
	pid = atoi(argv[1]);
	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	dir = opendir(path);
	pidfd = syscall(SYS_pidfd_open, pid, 0);
	if (!dir || pidfd < 0) {
		perror("cannot look at the process");
		return 1;
	}
	while ((entry = readdir(dir))) {
		ssize_t len = readlinkat(dirfd(dir), entry->d_name, link, sizeof(link) - 1);

		if (len < 0)
			continue;
		link[len] = 0;
		if (strncmp(link, argv[2], strlen(argv[2])))
			continue;
		if (syscall(SYS_pidfd_getfd, pidfd, atoi(entry->d_name), 0) < 0) {
			perror("cannot take the descriptor");
			return 1;
		}
		printf("held %s\n", link);
		fflush(stdout);
		closedir(dir);
		pause();
	}
	fprintf(stderr, "no descriptor of %s\n", argv[2]);
	return 1;
}
