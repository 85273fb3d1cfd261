/* SPDX-License-Identifier: Apache-2.0 */

/* The client's side of MPS, as far as it decides who computes where. The pipe directory's socket is
 * asked first, and waited for without end. Where no daemon listens there, the program runs without
 * MPS and is told nothing: so the real library does it. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "cuda_internal.h"
#include "transport.h"

enum { CUDA_ERROR_MPS_CONNECTION_FAILED = 805 };

/* The connection to the daemon, which lists the client until it ends; -1 without MPS. */
static int daemon_fd = -1;

CUresult mps_connect(int *server)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    const char *dir = getenv("CUDA_MPS_PIPE_DIRECTORY");
    char answer[64];
    *server = 0;
    if ((size_t)snprintf(to.sun_path, sizeof to.sun_path, "%s/control", dir ? dir : "/tmp/nvidia-mps") >= sizeof to.sun_path)
        return CUDA_SUCCESS;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0) {
        if (fd >= 0)
            close(fd);
        return CUDA_SUCCESS;
    }
    ssize_t n = send(fd, "client", 6, MSG_NOSIGNAL) == 6 ? 0 : -1;
    while (n == 0 && (n = recv(fd, answer, sizeof answer - 1, 0)) < 0 && errno == EINTR)
        n = 0;
    answer[n > 0 ? n : 0] = 0;
    int refused = CUDA_ERROR_MPS_CONNECTION_FAILED;
    if (sscanf(answer, "server %d", server) == 1 && *server > 0) {
        daemon_fd = fd;
        return CUDA_SUCCESS;
    }
    sscanf(answer, "error %d", &refused);
    close(fd);
    return refused;
}

CUresult mps_join(int server)
{
    struct call c;
    begin(&c, "cuEmulatorMPS", NO_HANDLE);
    put_u32(&c, (uint32_t)server);
    return send_call(&c);
}

void mps_leave(void)
{
    if (daemon_fd >= 0)
        close(daemon_fd);
    daemon_fd = -1;
}

bool mps_client(void) { return daemon_fd >= 0; }

int mps_multiprocessors(struct device *d)
{
    struct call c;
    if (!mps_client())
        return d->multiprocessors;
    const char *percent = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    double own = percent ? strtod(percent, NULL) : 0;
    begin(&c, "cuEmulatorSMs", d->handle);
    put_u32(&c, own > 0 && own <= 100 ? (uint32_t)(own * 100 + 0.5) : 0);
    return send_call(&c) == 0 ? (int)get_u32(&c) : d->multiprocessors;
}

CUresult mps_alive(void)
{
    struct call c;
    if (!mps_client())
        return CUDA_SUCCESS;
    begin(&c, "cuEmulatorAlive", NO_HANDLE);
    return send_call(&c);
}
