// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Load for a disk, a network or a vsock, of a guest whose VMM is measured, and the other end of the latter two:
//
//   io-load block PATH read|write random|sequential BLOCK_BYTES DEPTH SECONDS    prints requests a second
//   io-load send|receive|ask ADDRESS CONNECTIONS SECONDS    prints KiB, or questions answered, a second
//   io-load serve ADDRESS                                   until it is killed
//
// ADDRESS is tcp:IP:PORT, vsock:CID:PORT (to serve, the CID is not looked at) or unix:PATH.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/vm_sockets.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { DEPTH_MAX = 128, CONNECTIONS_MAX = 16, CHUNK = 128 << 10 };

static void die(const char *what)
{
    fprintf(stderr, "io-load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

// Numbers that repeat from run to run.
static unsigned long long next_random(void)
{
    static unsigned long long state = 0x9e3779b97f4a7c15;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static int block(char **args)
{
    int is_write = !strcmp(args[1], "write"), is_random = !strcmp(args[2], "random");
    size_t block_bytes = strtoul(args[3], 0, 10);
    unsigned depth = strtoul(args[4], 0, 10);
    double seconds = atof(args[5]), begin, end;
    int file = open(args[0], (is_write ? O_RDWR : O_RDONLY) | O_DIRECT);
    if (file < 0)
        die(args[0]);
    unsigned long long blocks = lseek(file, 0, SEEK_END) / block_bytes, sequence = 0, done = 0;
    if (!depth || depth > DEPTH_MAX || !blocks)
        return 2;
    aio_context_t context = 0;
    if (syscall(SYS_io_setup, depth, &context))
        die("io_setup");
    static struct iocb requests[DEPTH_MAX], *free_ones[DEPTH_MAX];
    struct io_event events[DEPTH_MAX];
    unsigned in_flight = 0, free_count = depth;
    for (unsigned i = 0; i < depth; i++) {
        void *buffer;
        if (posix_memalign(&buffer, 4096, block_bytes))
            die("memory");
        memset(buffer, 'a' + i, block_bytes);
        requests[i].aio_fildes = file;
        requests[i].aio_lio_opcode = is_write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        requests[i].aio_buf = (unsigned long)buffer;
        requests[i].aio_nbytes = block_bytes;
        requests[i].aio_data = (unsigned long)&requests[i];
        free_ones[i] = &requests[i];
    }
    begin = now_s();
    for (;;) {
        end = now_s();
        int is_over = end - begin >= seconds;
        if (is_over && !in_flight)
            break;
        if (!is_over && free_count) {
            for (unsigned i = 0; i < free_count; i++)
                free_ones[i]->aio_offset = (is_random ? next_random() : sequence++) % blocks * block_bytes;
            long taken = syscall(SYS_io_submit, context, free_count, free_ones);
            if (taken < 0)
                die("io_submit");
            memmove(free_ones, free_ones + taken, (free_count - taken) * sizeof(*free_ones));
            free_count -= taken;
            in_flight += taken;
        }
        long got = syscall(SYS_io_getevents, context, 1, depth, events, NULL);
        if (got < 0)
            die("io_getevents");
        for (long i = 0; i < got; i++) {
            if (events[i].res != (long long)block_bytes) {
                fprintf(stderr, "io-load: a request ended with %lld\n", (long long)events[i].res);
                return 1;
            }
            free_ones[free_count++] = (struct iocb *)(unsigned long)events[i].data;
        }
        in_flight -= got;
        done += got;
    }
    printf("%.1f\n", done / (end - begin));
    return 0;
}

union address {
    struct sockaddr any;
    struct sockaddr_in in;
    struct sockaddr_vm vm;
    struct sockaddr_un un;
};

// A socket for an address, which is taken apart.
static int socket_for(char *text, union address *address, socklen_t *len, int serves)
{
    char *kind = strtok(text, ":"), *host = strtok(NULL, ":"), *port = strtok(NULL, ":");
    memset(address, 0, sizeof(*address));
    if (kind && host && port && !strcmp(kind, "tcp")) {
        address->in.sin_family = AF_INET;
        address->in.sin_port = htons(atoi(port));
        if (inet_pton(AF_INET, host, &address->in.sin_addr) != 1)
            die(host);
        *len = sizeof(address->in);
    } else if (kind && host && port && !strcmp(kind, "vsock")) {
        address->vm.svm_family = AF_VSOCK;
        address->vm.svm_cid = serves ? VMADDR_CID_ANY : (unsigned)atoi(host);
        address->vm.svm_port = atoi(port);
        *len = sizeof(address->vm);
    } else if (kind && host && !strcmp(kind, "unix")) {
        address->un.sun_family = AF_UNIX;
        strncpy(address->un.sun_path, host, sizeof(address->un.sun_path) - 1);
        *len = sizeof(address->un);
    } else {
        errno = EINVAL;
        die("address");
    }
    int sock = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (sock < 0)
        die("socket");
    return sock;
}

static void without_delay(int sock, const union address *address)
{
    int on = 1;
    if (address->any.sa_family == AF_INET && setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
        die("TCP_NODELAY");
}

// One connection at the server: its first byte says what it wants.
static void *answer(void *argument)
{
    int sock = (int)(long)argument;
    char *buffer = calloc(1, CHUNK), want = 0;
    if (buffer && read(sock, &want, 1) == 1) {
        if (want == 's')
            while (read(sock, buffer, CHUNK) > 0)
                ;
        else if (want == 'r')
            while (send(sock, buffer, CHUNK, MSG_NOSIGNAL) > 0)
                ;
        else
            while (read(sock, buffer, 1) == 1 && send(sock, buffer, 1, MSG_NOSIGNAL) == 1)
                ;
    }
    free(buffer);
    close(sock);
    return NULL;
}

static void serve(char *text)
{
    union address address;
    socklen_t len;
    int on = 1, listener = socket_for(text, &address, &len, 1);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(listener, &address.any, len) || listen(listener, CONNECTIONS_MAX))
        die("bind");
    for (;;) {
        int sock = accept(listener, NULL, NULL);
        pthread_t thread;
        if (sock < 0)
            die("accept");
        without_delay(sock, &address);
        if (pthread_create(&thread, NULL, answer, (void *)(long)sock))
            die("thread");
        pthread_detach(thread);
    }
}

static union address peer;
static socklen_t peer_len;
static char want;
static double seconds;

// One connection of the load: how much it got through, in bytes or questions.
static void *load(void *argument)
{
    int sock = (int)(long)argument;
    char *buffer = calloc(1, CHUNK);
    double *done = calloc(1, sizeof(*done)), begin;
    if (!buffer || !done || connect(sock, &peer.any, peer_len))
        die("connect");
    without_delay(sock, &peer);
    if (write(sock, &want, 1) != 1)
        die("write");
    begin = now_s();
    while (now_s() - begin < seconds) {
        ssize_t len = 1;
        if (want == 's')
            len = write(sock, buffer, CHUNK);
        else if (want == 'r')
            len = read(sock, buffer, CHUNK);
        else if (write(sock, buffer, 1) != 1 || read(sock, buffer, 1) != 1)
            len = -1;
        if (len <= 0)
            die("connection");
        *done += len;
    }
    *done /= now_s() - begin;
    close(sock);
    free(buffer);
    return done;
}

int main(int count, char **args)
{
    signal(SIGPIPE, SIG_IGN);
    if (count == 8 && !strcmp(args[1], "block"))
        return block(args + 2);
    if (count == 3 && !strcmp(args[1], "serve"))
        serve(args[2]);
    if (count != 5)
        return 2;
    want = args[1][0];
    unsigned connections = atoi(args[3]);
    seconds = atof(args[4]);
    pthread_t threads[CONNECTIONS_MAX];
    double sum = 0;
    if (!strchr("sra", want) || !connections || connections > CONNECTIONS_MAX)
        return 2;
    for (unsigned i = 0; i < connections; i++) {
        char *text = strdup(args[2]);
        int sock = socket_for(text, &peer, &peer_len, 0);
        free(text);
        if (pthread_create(&threads[i], NULL, load, (void *)(long)sock))
            die("thread");
    }
    for (unsigned i = 0; i < connections; i++) {
        void *done;
        pthread_join(threads[i], &done);
        sum += *(double *)done;
    }
    printf("%.1f\n", want == 'a' ? sum : sum / 1024);
    return 0;
}
