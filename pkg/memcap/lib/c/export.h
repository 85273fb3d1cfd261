/* SPDX-License-Identifier: Apache-2.0 */

/* Exported memory: other processes, and other devices, can have it open, and then it
 * lives on when its owner has let go of it. It stays charged to the owner until a
 * reading shows that it is gone, or the owner ends; see account_exported. */
#ifndef CAP_EXPORT_H
#define CAP_EXPORT_H

#include "charge.h"

/* handle_exported notes that memory by hand was exported; by a handle of another's
 * that was imported it does nothing. */
void handle_exported(struct process *p, CUhandle handle);

/* range_was_exported says whether the allocation that began at an address and is
 * freed was exported, and forgets it. */
bool range_was_exported(struct process *p, CUdeviceptr at);

/* let_go_of_theirs is called after this process let go of memory that it had imported. That
 * may have been the last hold on it, and the exporter still has it charged. So what was
 * refused may have room now. */
void let_go_of_theirs(struct process *p);

/* uncounted_freed is called with the driver's answer after memory was freed that is not
 * charged here: it may come from an imported pool. */
CUresult uncounted_freed(struct process *p, CUresult r);

#endif
