/* SPDX-License-Identifier: Apache-2.0 */

/* An attempt is a call of the driver that may give more than was reserved, because
 * the driver should find what it needs in what it has: should it take more all the
 * same, that is undone. Until then the container has more than its cap, so of all
 * processes that share a usage page one makes an attempt at a time, and what is over
 * is one request at most. What was reserved never waits for an attempt.
 *
 * Whose turn it is stands in the page: [turns:32 | 1 + its slot:32], 0 in the lower
 * half where nothing is under way. A slot's lock tells whether its owner lives; the turn of
 * a dead one is over once its memory is back. One that lives and does not come back (a
 * stopped process, or whatever a tenant has written there) is waited for once, and
 * then attempts are not made until the word changes. */
#ifndef CAP_ATTEMPT_H
#define CAP_ATTEMPT_H

#include "count.h"

/* attempt_begin waits for the turn. False: it is not to be had. */
bool attempt_begin(struct account *a);
void attempt_end(struct account *a);

#endif
