/* SPDX-License-Identifier: Apache-2.0 */

/* Exported memory. Other processes and other devices can have it open, and then it
 * exists after its owner has freed it. It stays charged to the owner until a reading
 * shows that it is gone, or the owner ends; see account_exported. */
#ifndef CAP_EXPORT_H
#define CAP_EXPORT_H

#include "charge.h"

/* handle_exported notes that memory of cuMemCreate was exported. It does nothing for a
 * handle that was imported. */
void handle_exported(struct process *p, CUhandle handle);

/* range_was_exported says whether the allocation at an address, which is being freed, was
 * exported, and forgets it. */
bool range_was_exported(struct process *p, CUdeviceptr at);

/* let_go_of_theirs is called after this process let go of memory that it had imported. That
 * may have been the last hold on it, and the exporter still has it charged. So what was
 * refused may have room now. */
void let_go_of_theirs(struct process *p);

/* uncounted_freed is called with the driver's answer after memory was freed that is not
 * charged here: it may come from an imported pool. */
COLD CUresult uncounted_freed(struct process *p, CUresult r);

#endif
