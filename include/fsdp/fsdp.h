/*
 * fsdp.h - the whole public interface.
 */
#ifndef FSDP_FSDP_H
#define FSDP_FSDP_H

#include "status.h"
#include "dtype.h"
#include "context.h"
#include "device.h"
#include "comm.h"

#endif
