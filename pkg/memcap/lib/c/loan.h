/* SPDX-License-Identifier: Apache-2.0 */

/* A container may have several shares of one GPU, each with a pair of pages. Its processes
 * may have the sum of them. Another container may have one of these shares alone, and counts
 * on that one's page.
 *
 * A process counts all that it has on one page, its home: the one with the largest limit.
 * What does not fit there it borrows from the other pages. In each of these it has a slot
 * that is marked as lent, and reserves and commits there what it borrows; nobody else can
 * have that then. Its slot at home says how much that is, and the ceiling of the home page
 * is higher by the sum of what the slots of living processes say:
 *
 *     borrow     other page: reserved += n · bound += n · committed += n
 *                home page:  reserved += m · bound += m, up to ceiling + n · borrowed += n
 *     repay      home page:  borrowed -= n · bound -= m · reserved -= m
 *                other page: committed -= n · bound -= n · reserved -= n
 *
 * m is what the program asks for or gives back. n is at most m, unless the ceiling has fallen
 * below bound meanwhile. Two things follow, wherever a process is killed:
 *
 *     bound <= ceiling + sum of borrowed    what the page's ceiling is higher by, somebody lends
 *     borrowed <= the slot's share          so those who have the home share alone have no more than
 *                                           its ceiling allows
 *
 * What a dead process had borrowed is not added. All that it had then counts at home, as long
 * as it is not reaped there; afterwards the agent's reading sees whether the driver has it
 * back. So a lender's page may be reaped at once, though no reading of that page tells.
 *
 * What is given back goes to the lenders first, as far as it is room at once. What is lost
 * (count.h) is not: then the process keeps what was lent, without saying that it has borrowed
 * it, until a reading has told. A process that borrows keeps nothing idle,
 * since that would be a part of bound that is in nobody's share. When it next gives something
 * back, what has become free at home in the meantime goes to the lenders too; until then
 * they lack it.
 *
 * The agent compares each page with the driver's figure for those containers whose home it
 * is. There, what they have is all in bound; what is lent belongs to others, and is taken
 * off (see Counters in usage.go). */
#ifndef CAP_LOAN_H
#define CAP_LOAN_H

#include "sys.h"

struct account;

/* account_other opens another page of the same GPU, or returns NULL. */
COLD struct account *account_other(const char *limit_path, const char *usage_path);

/* account_loans adds up what living processes have borrowed for a page. */
COLD uint64_t account_loans(const struct account *a);

/* account_borrow reserves n, and borrows what there is no room for at home. False: that is not
 * to be had, or, where waits is false, not at once. */
COLD bool account_borrow(struct account *a, uint64_t n, bool waits);

/* account_repay is account_return for an account with other pages. */
COLD void account_repay(struct account *a, uint64_t n);

#endif
