/* SPDX-License-Identifier: Apache-2.0 */

/* A process is killed at each point of its work: after each STRIDEth instruction, or with a
 * STRIDE of 0 after each one that changed what it shares with others. That is enough: nothing
 * else of a dead process is left to others, so a kill between two changes is a kill after the
 * first. What it does has parts, each of which begins with a mark. It is slow in one
 * part only, which is where it dies. */
#ifndef STEP_H
#define STEP_H

#include <signal.h>
#include <stdbool.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/wait.h>

/* A point is where a process dies: so many instructions or changes after a mark. */
struct point {
    int part, after;
    int points; /* there were before */
    bool over;  /* the process has ended before it */
};

static inline void mark(void) { raise(SIGSTOP); }

/* stop_at lets a child go to a point, and kills it there. It returns false where the child
 * does not stop. changed says whether there was a change since it was last asked; check is
 * called after each instruction. status is what the child ended with. */
static bool stop_at(pid_t pid, struct point *at, int stride, bool (*changed)(void), void (*check)(void), int *status)
{
    for (int part = 0;; part++) {
        if (waitpid(pid, status, 0) != pid)
            return false;
        at->over = !WIFSTOPPED(*status);
        if (at->over || part == at->part)
            break;
        ptrace(PTRACE_CONT, pid, 0, 0);
    }
    if (at->over && at->part == 0)
        return false;
    if (!stride)
        changed();
    for (int i = 0; i < at->after && !at->over; i += stride || changed()) {
        ptrace(PTRACE_SINGLESTEP, pid, 0, 0);
        if (waitpid(pid, status, 0) != pid)
            return false;
        check();
        at->over = !WIFSTOPPED(*status);
        if (!at->over && WSTOPSIG(*status) == SIGSTOP) {
            at->part++;
            at->after = 0;
        }
    }
    if (!at->over) {
        int killed;
        kill(pid, SIGKILL);
        waitpid(pid, &killed, 0);
    }
    at->after += stride ? stride : 1;
    at->points++;
    return true;
}

#endif
