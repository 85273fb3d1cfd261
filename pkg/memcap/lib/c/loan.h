/* SPDX-License-Identifier: Apache-2.0 */

/* A container may have several shares of one GPU, each with a pair of pages. Its processes may have
 * the sum of the shares. Another container may have only one of these shares. It counts on the page
 * of that share.
 *
 * A process counts all its memory on one page, its home: the page with the largest limit. It
 * borrows from the other pages what does not fit there. On each of them it has a slot that is
 * marked as lent. There it reserves and commits what it borrows, so no other process can have that.
 * Its slot at home has the amount that it has borrowed. The ceiling of the home page rises by the
 * sum of these amounts, over the slots of living processes:
 *
 *     borrow     other page: reserved += n · bound += n · committed += n
 *                home page:  reserved += m · bound += m, up to ceiling + n · borrowed += n
 *     repay      home page:  borrowed -= n · bound -= m · reserved -= m
 *                other page: committed -= n · bound -= n · reserved -= n
 *
 * m is what the program asks for or gives back. n is at most m, unless the ceiling has fallen below
 * bound meanwhile. Two things follow, wherever a process is killed:
 *
 *     bound <= ceiling + sum of borrowed    all that raises the ceiling is lent by another page
 *     borrowed <= the slot's share          processes with the home share alone have at most
 *                                           what its ceiling allows
 *
 * What a dead process had borrowed is not added. All that the process had counts at home until it
 * is reaped there. After that, the agent's reading sees whether the driver has it back. So a
 * lender's page may be reaped at once, although no reading of that page sees this memory.
 *
 * A process gives back to the lenders first, as far as that is room at once. Lost memory (count.h)
 * is not: the process keeps what was lent for it until the next reading, but its slot no longer
 * counts that as borrowed. A process that borrows keeps nothing idle, since idle memory is a part
 * of bound that belongs to no process. When it next gives something back, the lenders also get what
 * has become free at home in the meantime. Until then they lack it.
 *
 * The agent compares each page with the driver's figure for the containers whose home it is. All
 * that these containers have is in the page's bound. What the page lends belongs to other
 * containers, and is taken off (see Counters in usage.go). */
#ifndef CAP_LOAN_H
#define CAP_LOAN_H

#include "sys.h"

struct account;

/* account_other opens another page of the same GPU. NULL: it cannot be opened. */
COLD struct account *account_other(const char *limit_path, const char *usage_path);

/* account_loans adds up what living processes have borrowed for a page. */
COLD uint64_t account_loans(const struct account *a);

/* account_borrow reserves n, and borrows what does not fit at home. False: there is not enough to
 * borrow. If waits is false, it does not wait for that. */
COLD bool account_borrow(struct account *a, uint64_t n, bool waits);

/* account_repay is account_return for an account with other pages. */
COLD void account_repay(struct account *a, uint64_t n);

#endif
