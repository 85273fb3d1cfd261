// SPDX-License-Identifier: Apache-2.0

// Package command gives the product's programs one kind of command line, on top of cobra.
//
// A program makes a tree of cobra commands and passes it to [New] with the prefix of its
// environment variables:
//
//	root := &cobra.Command{Use: "gpu-agent", Short: "own the GPUs of a node"}
//	root.AddCommand(newRun(), newPlan())
//	err := command.New(root, "GPU_AGENT_").Execute(ctx, os.Args[1:], os.Environ())
//
// New adds what all commands have in common:
//
//   - --help goes to standard output and ends with exit code 0. So does `help COMMAND`.
//   - Wrong usage gives exit code 2 and one line on standard error, with what to write instead. A
//     long flag with a single dash is wrong usage.
//   - Each flag has an environment variable: the prefix, and the flag's name in capitals with _
//     for -. The command line wins. A variable with the prefix that belongs to no flag of any
//     command is wrong usage, so that a misspelt one is not ignored. In pods, Kubernetes sets
//     variables that can have the same prefix: for a Service gpu-agent they are
//     GPU_AGENT_SERVICE_HOST, GPU_AGENT_PORT_9500_TCP and others. They are ignored, if there is a
//     variable NAME_SERVICE_HOST beside them.
//   - `completion SHELL` prints a script for a shell. It completes commands, flags and values.
//     The flag has the values: a [Choice] and a [List] know theirs. A flag whose value is called
//     `file` is completed with files, and `directory` with directories.
//
// [Domains], [Log] and the functions beside them are flags that both programs have. [NewVersion]
// makes a command of both programs, and [NewMoved] one that has moved to another program.
//
// [Program.Reference] returns the commands and the flags with their variables as Markdown, and
// [ExitCodes] the exit codes. [Program.Flaws] returns what a program's own test must refuse: a
// command without an example, or one name that means different things in two commands.
//
// [Exit] lists the exit codes of all programs. The package never ends the process: Execute
// returns an error, and [ExitOf] its exit code.
package command
