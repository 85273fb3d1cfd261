// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
)

// examples has a command line for each command that has flags.
var examples = map[string]string{
	"run":                       "gpu-agent run --config partitions.yaml --node-name node-1",
	"inventory":                 "gpu-agent inventory -o json > node-1.json",
	"check":                     "gpu-agent check partitions.yaml --inventory node-1.json --partition default",
	"plan":                      "gpu-agent plan --config partitions.yaml --partition night --inventory node-1.json",
	"topology":                  "gpu-agent topology --inventory node-1.json",
	"status":                    "kubectl exec -n gpu-agent ds/gpu-agent -- gpu-agent status",
	"usage":                     "gpu-agent usage --at 2026-11-03T12:00:00Z --gpu 3",
	"advise":                    "gpu-agent advise --since 168h --trace pods.json -o partition > better.yaml",
	"placer":                    "gpu-agent placer --kubeconfig ~/.kube/config --doors kueue",
	"certificates":              "gpu-agent certificates --out door --names gpu-placer.gpu-placer.svc,10.96.0.20",
	"cleanup":                   "gpu-agent cleanup --node-name node-1 --wait",
	"export kueue":              "gpu-agent export kueue --cloud cloud=640GiB --checks --team research,urgent --team records,on-prem",
	"export karpenter":          "gpu-agent export karpenter --config partitions.yaml --nodepool gpus p4de.24xlarge/mig=node-2.json",
	"export cluster-autoscaler": "gpu-agent export cluster-autoscaler --form aws --config partitions.yaml p4de.24xlarge=node-1.json",
}

// Set by the build (-ldflags "-X main.release=…"): the release, the commit, and its date, which is
// the same whenever it is built.
var release, commit, date string

// version is the release, or the commit that was built.
func version() string {
	if release != "" {
		return release
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// versionLine is what people want to know of a program that they have found.
func versionLine() string {
	return fmt.Sprintf("%s (commit %s of %s, %s %s/%s)", version(), cmp.Or(commit, "unknown"), cmp.Or(date, "unknown date"), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

const completionUsage = `usage: gpu-agent completion bash|zsh|fish

Prints what makes a shell complete commands, flags and files:

  source <(gpu-agent completion bash)          # or zsh
  gpu-agent completion fish | source
`

// completions ask the program itself for its commands and flags, so they fit the program that there is.
var completions = map[string]string{
	"bash": bashCompletion,
	"zsh":  "autoload -U +X bashcompinit && bashcompinit\n" + bashCompletion,
	"fish": `function __gpu_agent_flags
    set -l words (commandline -opc)
    test (count $words) -gt 1; and gpu-agent $words[2..] -h 2>&1 | string match -rg '^  -(\S+)' | string replace -r '^' --
end
complete -c gpu-agent -n __fish_use_subcommand -f -a '(gpu-agent help | string match -rg "^  ([a-z]+) ")'
complete -c gpu-agent -n 'not __fish_use_subcommand' -a '(__gpu_agent_flags)'
complete -c gpu-agent -n '__fish_seen_subcommand_from export' -a 'kueue karpenter cluster-autoscaler'
`,
}

const bashCompletion = `_gpu_agent() {
    local word=${COMP_WORDS[COMP_CWORD]} words
    case $COMP_CWORD,${COMP_WORDS[1]},$word in
    1,*) words=$(gpu-agent help | sed -n 's/^  \([a-z]*\) .*/\1/p') ;;
    2,export,[!-]* | 2,export,) words="kueue karpenter cluster-autoscaler" ;;
    2,completion,*) words="bash zsh fish" ;;
    *,export,-*) words=$(gpu-agent export "${COMP_WORDS[2]}" -h 2>&1 | sed -n 's/^  -\([^ ]*\).*/--\1/p') ;;
    *,-*) words=$(gpu-agent "${COMP_WORDS[1]}" -h 2>&1 | sed -n 's/^  -\([^ ]*\).*/--\1/p') ;;
    *) COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o filenames -F _gpu_agent gpu-agent
`
