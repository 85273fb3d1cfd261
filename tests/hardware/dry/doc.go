// SPDX-License-Identifier: Apache-2.0

// Package dry has an emulated driver for the kit of questions to a card (tests/hardware/run),
// so that they can be asked where there is none:
//
//	d, err := dry.Start(ctx, emulator.Spec{Model: "H200-141GB", Count: 1})
//	defer d.End()
//	cmd.Env = append(os.Environ(), d.Env)
//
// It serves programs of this machine and of containers on it. Where this process may not make
// device nodes there are none, and containers cannot be had.
package dry
