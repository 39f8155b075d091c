/*
 * fsdp.h - the whole public interface.
 */
#ifndef FSDP_FSDP_H
#define FSDP_FSDP_H

#include "status.h"
#include "dtype.h"
#include "context.h"
#include "device.h"
#include "tensor.h"
#include "autograd.h"
#include "ops.h"
#include "nn.h"
#include "comm.h"
#include "mesh.h"
#include "dtensor.h"
#include "shard.h"
#include "shard_hooks.h"
#include "optim.h"
#include "data.h"
#include "models.h"
#include "lora.h"
#include "hf.h"

#endif
