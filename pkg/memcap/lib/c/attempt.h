/* SPDX-License-Identifier: Apache-2.0 */

/* An attempt is a call of the driver without a reservation, made where the driver should
 * find what it needs in a pool that it has already. If the driver takes more all the same,
 * that is undone. Until then the container has more than its cap. So of all processes
 * that share a usage page only one makes an attempt at a time, and the excess is at most
 * one request. A call with a reservation never waits for an attempt.
 *
 * The page says whose turn it is: [turns:32 | 1 + slot:32], with 0 in the lower half where
 * nobody makes an attempt. The slot's lock tells whether its owner lives. The turn of a
 * dead owner ends once its memory is back, or when another process takes its slot. An owner that lives and does not finish (a
 * stopped process, or something that a tenant wrote there) is waited for once; after that
 * no attempts are made until the word changes. */
#ifndef CAP_ATTEMPT_H
#define CAP_ATTEMPT_H

#include "count.h"

/* attempt_begin waits for the turn, half a second at most for each that has it before, and eight
 * seconds in all. False: it did not get it. */
bool attempt_begin(struct account *a);
void attempt_end(struct account *a);

#endif
