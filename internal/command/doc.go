// SPDX-License-Identifier: Apache-2.0

// Package command gives the product's programs one kind of command line, on top of cobra.
//
// A program makes a tree of cobra commands and hands it to [New] with the prefix of its
// environment variables:
//
//	root := &cobra.Command{Use: "gpu-agent", Short: "own the GPUs of a node"}
//	root.AddCommand(newRun(), newPlan())
//	err := command.New(root, "GPU_AGENT_").Execute(ctx, os.Args[1:], os.Environ())
//
// New adds what all commands have in common:
//
//   - --help goes to standard output and ends with exit code 0. So does `help COMMAND`.
//   - Wrong usage is one line on standard error that says what to write instead, and exit
//     code 2. A long flag with a single dash is wrong usage.
//   - Each flag has an environment variable: the prefix, and the flag's name in capitals with
//     _ for -. The command line wins. A variable with the prefix that belongs to no flag of any
//     command is wrong usage, so that a misspelt one does not pass for its default.
//     Kubernetes sets variables of its own in pods, which can have the same prefix: a
//     Service gpu-agent brings GPU_AGENT_SERVICE_HOST, GPU_AGENT_PORT_9500_TCP and others.
//     They are told by a variable NAME_SERVICE_HOST beside them, and ignored.
//   - `completion SHELL` prints what makes a shell complete commands, flags and values.
//     Values come from the flag: a [Choice] and a [List] have them, a flag whose value is called
//     `file` takes files, one whose value is called `directory` takes directories.
//
// [Domains], [Log] and the functions beside them are flags that both programs have.
// [NewVersion] makes a command of both, and [NewMoved] one that another program has now.
//
// [Program.Reference] writes the commands and the flags with their variables as Markdown,
// [ExitCodes] the exit codes. [Program.Flaws] says what a program's own test is to refuse: a
// command without an example, or one name that means different things in two commands.
//
// [Exit] lists the exit codes of all programs. The package never ends the process: Execute
// returns an error, and [ExitOf] its exit code.
package command
