/*
 * file.h - memory that lies in a file, of which a window is in memory at a time.
 *
 * A block is a range of the file, mapped. It can be read and written like any memory at any moment:
 * the kernel brings in what is touched. All calls below only steer what lies in memory when, and
 * measure the waiting, so that they change no value.
 *
 *     out      on the disk alone
 *     ahead    being read; counted into the window
 *     in use   in memory, held there until done
 *     in       in memory until others need the room: written back, dropped
 *
 * Invariants: 1. the window counts all blocks that are not out, in whole pages; 2. it is at most
 * its limit, or what is in use if that is more; 3. every block has its bytes on the disk from the
 * start (posix_fallocate), so that no write can find the disk full; 4. a new block reads as zeros.
 */
#ifndef FSDP_DEVICE_FILE_H
#define FSDP_DEVICE_FILE_H

#include "device/allocator.h"

/* The current context's memory in a file of that folder, made on first use and shared by all who
 * name it; window as in fsdp_offload_policy. NULL: error kept (no such folder, not writable). */
fsdp__allocator *fsdp__allocator_file(const char *folder, int64_t window);

/* The allocator of a policy that a user gave for `what` ("parameters"): *out NULL where they stay in
 * plain memory. Checks the policy, and says in the log what it does not change. */
fsdp_status fsdp__offload_allocator(const fsdp_offload_policy *p, const char *what,
                                    fsdp__allocator **out);

/* The bytes that a block of so many takes: whole pages. */
int64_t fsdp__file_round(int64_t bytes);
/* Asks the disk for the (rounded) bytes of blocks that will be taken, or gives back (negative) what
 * was asked for. FSDP_IO_ERROR with what there is: nothing is asked for. */
fsdp_status fsdp__file_reserve(fsdp__allocator *a, int64_t bytes);

/* Starts to read p ahead of its use. False: not now, since half of the window is in use or read
 * ahead already. */
bool fsdp__file_ahead(fsdp__allocator *a, const void *p);
/* p is in memory when this returns, until as many done. FSDP_IO_ERROR: the disk failed. */
fsdp_status fsdp__file_use(fsdp__allocator *a, const void *p);
void fsdp__file_done(fsdp__allocator *a, const void *p, bool written);
/* p was written, or is going to be read, without a use around it. */
void fsdp__file_note(fsdp__allocator *a, const void *p, bool written);

#endif
