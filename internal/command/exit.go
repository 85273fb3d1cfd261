// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"fmt"
)

// Exit is an exit code. Each has one meaning in all commands.
type Exit int

const (
	// Done: the command has done what it was asked to.
	Done Exit = iota
	// Failed: the command could not do its work. Any error without another code has this one.
	Failed
	// Usage: the command line or an environment variable is wrong. Nothing was done.
	Usage
	// Blocked: holders are in the way.
	Blocked
	// NotApplied: a partition would not be applied, for a reason other than holders.
	NotApplied
	// Invalid: a partition file is wrong, or it does not fit these GPUs.
	Invalid
)

// meanings explains the exit codes in the reference.
var meanings = [...]string{
	Done: "done; of `plan`: the partition would be `applied`; " +
		"of `check`: all partitions fit, even if they would wait for holders",
	Failed: "failed: standard error has the reason",
	Usage: "the command line or an environment variable is wrong: " +
		"standard error has one line with what to write instead",
	Blocked: "holders are in the way: `plan` names those that the partition would wait for (`blocked`), " +
		"`cleanup` the pods that hold devices",
	NotApplied: "of `plan`: the partition would be `pending` or `failed`: you must reset a GPU, " +
		"the driver does not answer, or another program gives out a GPU; " +
		"of `check --node`: an earlier owner has left something that keeps GPUs from being used",
	Invalid: "the partition file is wrong, or a partition does not fit these GPUs " +
		"(`invalid`; of `check`, `failed` too): standard error has the lines",
}

// Error is an error with an exit code of its own.
type Error struct {
	Exit Exit
	// Err is what is wrong; nil if the command's output has it already.
	Err error
}

func (e *Error) Error() string {
	if e.Err == nil {
		return ""
	}
	return e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// Usagef returns an error of wrong usage. Its text is what to write instead. The names of
// the program and the command are put before it.
func Usagef(format string, args ...any) error { return &Error{Usage, fmt.Errorf(format, args...)} }

// ExitOf returns the exit code of an error of [Program.Execute].
func ExitOf(err error) Exit {
	var e *Error
	switch {
	case err == nil:
		return Done
	case errors.As(err, &e):
		return e.Exit
	}
	return Failed
}
