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

#endif
