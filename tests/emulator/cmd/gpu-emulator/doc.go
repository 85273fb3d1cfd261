// SPDX-License-Identifier: Apache-2.0

// Gpu-emulator is the emulated NVIDIA driver as one program: it builds the
// driver's libraries, lays them down like an install, serves a world of GPUs
// and does to that world what hardware does.
//
//	gpu-emulator build --out DIR
//	gpu-emulator install --root / --prefix /run/nvidia/driver --libraries DIR --world FILE
//	gpu-emulator serve --world FILE --socket /run/nvidia/driver/run/nvidia-persistenced/socket
//	gpu-emulator node --libraries DIR --machine 8xH100-80GB
//	gpu-emulator xid --gpu 3 48
//	gpu-emulator unplug --gpu 3
//	gpu-emulator unload && gpu-emulator load --driver 590.44.01
//
// The commands that act on a running world find it by --socket, else by
// GPU_EMULATOR_SOCKET, else where a driver at / has it.
package main
