/* SPDX-License-Identifier: Apache-2.0 */

/* NVIDIA's libraries make the device nodes that they miss, and load the driver's
 * module, where they are run by root. A judge changes nothing on the machine. */
#include <linux/capability.h>
#include <linux/securebits.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* alone gives up all that root may do beyond its own files, for what this program
 * runs too. It returns 0, and says why if it cannot. */
static int alone(void)
{
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0, 0, 0}, {0, 0, 0}};
    if (geteuid() == 0 && prctl(PR_SET_SECUREBITS, SECBIT_NOROOT | SECBIT_NOROOT_LOCKED) != 0)
        return perror("FAILED: secure bits"), 1;
    if (syscall(SYS_capset, &head, none) != 0)
        return perror("FAILED: capabilities"), 1;
    return 0;
}
