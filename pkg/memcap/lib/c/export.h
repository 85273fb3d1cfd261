/* SPDX-License-Identifier: Apache-2.0 */

/* Exported memory. Other processes and other devices can have it open. Then it exists after its
 * owner has freed it. It stays charged to the owner until a reading shows that it is gone, or the
 * owner ends; see account_exported. */
#ifndef CAP_EXPORT_H
#define CAP_EXPORT_H

#include "charge.h"

/* handle_exported notes that memory of cuMemCreate was exported. It does nothing for an imported
 * handle. */
void handle_exported(struct process *p, CUhandle handle);

/* range_was_exported reports whether the allocation at an address was exported, and forgets that.
 * It is called when the allocation is freed. */
bool range_was_exported(struct process *p, CUdeviceptr at);

/* import_released is called after this process has released imported memory. It may have been the
 * last process to have that memory, while the exporter still has it charged. So a request that was
 * refused may fit now. */
void import_released(struct process *p);

/* uncounted_freed is called after a free of memory that is not charged here, with the driver's
 * answer. The memory may come from an imported pool. */
COLD CUresult uncounted_freed(struct process *p, CUresult r);

#endif
