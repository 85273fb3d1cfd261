// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// values are what the flags of the program below came to.
type values struct {
	nodeName, file, hostRoot string
	every                    time.Duration
	level                    Choice
	doors                    List
	ran                      string
	args                     []string
}

// program is one with two commands and a group.
func program(v *values) *cobra.Command {
	root := &cobra.Command{Use: "tool", Short: "do things"}
	ran := func(c *cobra.Command, args []string) error {
		v.ran, v.args = c.CommandPath(), args
		return nil
	}
	v.level = Choice{Value: "info", Of: []string{"info", "error"}}
	v.doors = List{Values: []string{"front"}, Of: []string{"front", "back", "side"}}
	work := &cobra.Command{Use: "work [FILE]...", Short: "work", Example: "tool work --node-name n a.txt", Args: cobra.ArbitraryArgs, RunE: ran}
	work.Flags().StringVar(&v.nodeName, "node-name", "", "`name` of the node")
	work.Flags().StringVar(&v.hostRoot, "host-root", "/", "host's `directory`")
	work.Flags().DurationVar(&v.every, "every", time.Second, "`time` between")
	work.Flags().VarP(&v.level, "output", "o", "what to print")
	work.Flags().Var(&v.doors, "doors", "for whom")
	rest := &cobra.Command{Use: "rest", Short: "rest", Example: "tool rest", RunE: ran}
	rest.Flags().StringVar(&v.file, "config", "", "partition `file`")
	group := &cobra.Command{Use: "show", Short: "show things"}
	for _, name := range []string{"one", "two"} {
		c := &cobra.Command{Use: name, Short: "show " + name, Example: "tool show " + name, RunE: ran}
		c.Flags().StringVar(&v.file, "config", "", "partition `file`")
		group.AddCommand(c)
	}
	root.AddCommand(work, rest, group)
	return root
}

// run executes a command line of that program.
func run(t *testing.T, environ []string, line ...string) (v values, out, said string, err error) {
	t.Helper()
	root := program(&v)
	var o, e bytes.Buffer
	root.SetOut(&o)
	root.SetErr(&e)
	err = New(root, "TOOL_").Execute(t.Context(), line, environ)
	return v, o.String(), e.String(), err
}

func TestRightUsage(t *testing.T) {
	v, out, said, err := run(t, []string{"PATH=/bin"}, "work", "--node-name", "-n", "a.txt", "-oerror", "--doors", "side, back", "--host-root=/h", "--", "-node-name")
	if err != nil || out+said != "" || v.ran != "tool work" || v.nodeName != "-n" || v.level.Value != "error" || v.doors.String() != "side,back" || !v.doors.Has("back") || v.doors.Has("front") || v.hostRoot != "/h" {
		t.Errorf("%+v, %v: %s%s", v, err, out, said)
	}
	if !slices.Equal(v.args, []string{"a.txt", "-node-name"}) {
		t.Errorf("arguments %q", v.args)
	}
	if v, _, _, err := run(t, nil, "show", "two", "--config", "-host-root"); err != nil || v.ran != "tool show two" || v.file != "-host-root" {
		t.Errorf("%+v, %v", v, err)
	}
}

// Each mistake is one line, which names what to write.
func TestWrongUsage(t *testing.T) {
	for line, want := range map[string]string{
		"":                        "tool: a command is missing, one of completion, rest, show, work",
		"wrok":                    `tool: there is no command "wrok": write work`,
		"wor --node-name n":       `tool: there is no command "wor": write work`,
		"dance":                   `tool: there is no command "dance": the commands are completion, rest, show, work`,
		"--dance":                 "tool: there is no flag --dance: tool --help lists the flags",
		"show":                    "tool show: a command is missing, one of one, two",
		"show tow":                `tool show: there is no command "tow": write two`,
		"help dance":              `tool help: there is no command "dance": the commands are completion, rest, show, work`,
		"rest now":                `tool rest: unexpected argument "now": the command takes only flags`,
		"work -node-name n":       "tool work: -node-name: write --node-name",
		"work -node-name=n":       "tool work: -node-name: write --node-name",
		"work -host-root /":       "tool work: -host-root: write --host-root",
		"work -output info":       "tool work: -output: write --output",
		"work a -o info -every=1": "tool work: -every: write --every",
		"work -nodename n":        "tool work: there is no flag -nodename: write --node-name",
		"work --node_name n":      "tool work: there is no flag --node_name: write --node-name",
		"work --node n":           "tool work: there is no flag --node: write --node-name",
		"work --Every=1s":         "tool work: there is no flag --Every: write --every",
		"work --colour":           "tool work: there is no flag --colour: tool work --help lists the flags",
		"work --node-name":        "tool work: --node-name has no value: write --node-name NAME",
		"work -o":                 "tool work: --output has no value: write --output INFO|ERROR",
		"work -o loud":            `tool work: --output "loud": want one of info, error`,
		"work --doors front,roof": `tool work: --doors "front,roof": there is no "roof": want some of front, back, side`,
		"work --every soon":       `tool work: --every "soon": time: invalid duration "soon"`,
		"completion":              "tool completion: write one shell: bash, zsh, fish or powershell",
		"completion bash zsh":     "tool completion: write one shell: bash, zsh, fish or powershell",
	} {
		v, out, said, err := run(t, nil, strings.Fields(line)...)
		if err == nil || err.Error() != want || ExitOf(err) != Usage || out+said != "" || v.ran != "" {
			t.Errorf("%q: %v (exit code %d), printed %q and ran %q; want %s", line, err, ExitOf(err), out+said, v.ran, want)
		}
	}
}

func TestEnvironment(t *testing.T) {
	service := []string{"TOOL_SERVICE_HOST=10.0.0.1", "TOOL_SERVICE_PORT=80", "TOOL_SERVICE_PORT_HTTP=80", "TOOL_PORT=tcp://10.0.0.1:80", "TOOL_PORT_80_TCP=tcp://10.0.0.1:80",
		"TOOL_PORT_80_TCP_PROTO=tcp", "TOOL_PORT_80_TCP_PORT=80", "TOOL_PORT_80_TCP_ADDR=10.0.0.1", "TOOL_PORT_53_UDP=udp://10.0.0.1:53", "TOOL_A_B_SERVICE_HOST=10.0.0.2", "TOOL_A_B_PORT=tcp://10.0.0.2:80"}
	for _, test := range []struct {
		environ []string
		line    string
		name    string // of the node
		every   time.Duration
		err     string
	}{
		{[]string{"TOOL_NODE_NAME=n", "TOOL_EVERY=3s"}, "work", "n", 3 * time.Second, ""},
		{[]string{"TOOL_NODE_NAME=n", "TOOL_NODE_NAME=m"}, "work --every 2s", "n", 2 * time.Second, ""}, // as os.Getenv
		{[]string{"TOOL_NODE_NAME=n", "TOOL_EVERY=soon"}, "work --every 2s --node-name=", "", 2 * time.Second, ""},
		{[]string{"TOOL_CONFIG=of another command"}, "work", "", time.Second, ""},
		{[]string{"NODE_NAME=n", "TOOLS_NAME=x", "TOOL=x", "TOOL_COMPLETION_DESCRIPTIONS=0", "TOOL_ACTIVE_HELP=0"}, "work", "", time.Second, ""},
		{service, "work", "", time.Second, ""},
		{append([]string{"TOOL_NODENAME=n"}, service...), "work", "", time.Second, "tool work: no flag has the environment variable TOOL_NODENAME: write TOOL_NODE_NAME"},
		{service[1:9], "work", "", time.Second, "tool work: no flag has the environment variable TOOL_PORT: unset it"}, // there is no such Service
		{[]string{"TOOL_SERVICE_HOST=10.0.0.1", "TOOL_PORTS=x"}, "work", "", time.Second, "tool work: no flag has the environment variable TOOL_PORTS: unset it"},
		{[]string{"TOOL_HELP=true"}, "work", "", time.Second, "tool work: no flag has the environment variable TOOL_HELP: unset it"},
		{[]string{"TOOL_EVERY=soon"}, "work", "", time.Second, `tool work: environment variable TOOL_EVERY="soon": time: invalid duration "soon"`},
		{[]string{"TOOL_CONFIGS=x"}, "rest", "", time.Second, "tool rest: no flag has the environment variable TOOL_CONFIGS: write TOOL_CONFIG"},
		{[]string{"TOOL_X=x"}, "help", "", time.Second, ""},
		{[]string{"TOOL_X=x"}, "work --help", "", time.Second, ""},
		{[]string{"TOOL_X=x"}, "completion fish", "", time.Second, ""},
		{[]string{"TOOL_X=x"}, cobra.ShellCompRequestCmd + " wo", "", time.Second, ""},
	} {
		v, _, _, err := run(t, test.environ, strings.Fields(test.line)...)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if v.nodeName != test.name || v.every != test.every && text == "" || text != test.err || (err != nil) != (ExitOf(err) == Usage) {
			t.Errorf("%q with %q: node %q, every %v, %v; want %q, %v, %s", test.line, test.environ, v.nodeName, v.every, err, test.name, test.every, test.err)
		}
	}
}

// Help goes to standard output, however it is asked for.
func TestHelp(t *testing.T) {
	const want = `Work.

Usage:
  tool work [FILE]... [FLAGS]

Example:
  tool work --node-name n a.txt

Flags:
      --doors front,back,side   for whom (default front)
      --every time              time between (default 1s)
  -h, --help                    print this help
      --host-root directory     host's directory (default "/")
      --node-name name          name of the node
  -o, --output info|error       what to print (default info)

Each flag has an environment variable: --doors is TOOL_DOORS. The command line wins.
`
	for _, line := range []string{"work --help", "work -h", "work -h --every", "help work", "work a.txt --help", "--help work"} {
		if _, out, said, err := run(t, nil, strings.Fields(line)...); line != "work -h --every" && (err != nil || out != want || said != "") {
			t.Errorf("%q: %v\n%s%s", line, err, out, said)
		}
	}
	_, out, _, err := run(t, nil, "show", "-h")
	if err != nil || !strings.HasPrefix(out, "Show things.\n\nUsage:\n  tool show COMMAND [FLAGS]\n\nCommands:\n  one  show one\n  two  show two\n\nFlags:\n") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if _, out, _, err := run(t, nil, "completion", shell); err != nil || !strings.Contains(out, "tool") || !strings.Contains(out, "__complete") {
			t.Errorf("%s: %v, %d bytes", shell, err, len(out))
		}
	}
	for line, want := range map[string]string{
		"w":                    "work :4",
		"work --ho":            "--host-root :4",
		"work --output ":       "info error :4",
		"work --output=e":      "error :4",
		"work --doors front,":  "front,back front,side :4",
		"work --doors front,s": "front,side :4",
		"work --host-root ":    ":16", // directories
		"rest --config ":       ":0",  // files
		"work ":                ":0",
		"rest ":                ":4", // nothing
		"work --every ":        ":4",
		"completion p":         "powershell :4",
		"help sh":              "completion work rest show :4", // the shell chooses
		"help show ":           "one two :4",
	} {
		_, out, _, err := run(t, nil, append([]string{cobra.ShellCompNoDescRequestCmd}, strings.Split(line, " ")...)...)
		got, wanted := strings.Fields(out), strings.Fields(want)
		slices.Sort(got)
		slices.Sort(wanted)
		if err != nil || !slices.Equal(got, wanted) {
			t.Errorf("%q is completed with %q, want %q: %v", line, got, wanted, err)
		}
	}
}

// What is completed by asking somebody is asked with the environment's flags, too.
func TestCompletionKnowsTheEnvironment(t *testing.T) {
	for _, test := range []struct {
		environ []string
		line    string
		want    string
	}{
		{[]string{"TOOL_NODE_NAME=n"}, "work ", "of-n :4"},
		{[]string{"TOOL_NODE_NAME=n"}, "work --node-name=m ", "of-m :4"},
		{[]string{"TOOL_NODE_NAME=n", "TOOL_EVERY=soon"}, "work ", "of- :4"}, // no error is printed
	} {
		var v values
		root := program(&v)
		for _, c := range root.Commands() {
			if c.Name() == "work" {
				c.ValidArgsFunction = func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
					return []cobra.Completion{"of-" + v.nodeName}, cobra.ShellCompDirectiveNoFileComp
				}
			}
		}
		var out bytes.Buffer
		root.SetOut(&out)
		root.SetErr(new(bytes.Buffer))
		err := New(root, "TOOL_").Execute(t.Context(), append([]string{cobra.ShellCompNoDescRequestCmd}, strings.Split(test.line, " ")...), test.environ)
		if got := strings.Join(strings.Fields(out.String()), " "); err != nil || got != test.want {
			t.Errorf("with %q, %q is completed with %q, want %q: %v", test.environ, test.line, got, test.want, err)
		}
	}
}

func TestExits(t *testing.T) {
	plain := errors.New("broken")
	for _, test := range []struct {
		err  error
		want Exit
		text string
	}{
		{nil, Done, ""}, {plain, Failed, "broken"}, {Usagef("write %s", "b"), Usage, "write b"}, {fmt.Errorf("a: %w", &Error{Blocked, plain}), Blocked, "a: broken"},
		{&Error{Exit: NotApplied}, NotApplied, ""},
	} {
		if ExitOf(test.err) != test.want || test.err != nil && test.err.Error() != test.text {
			t.Errorf("%v: exit code %d, want %d and %q", test.err, ExitOf(test.err), test.want, test.text)
		}
	}
	if !errors.Is(Usagef("a: %w", plain), plain) {
		t.Error("an error of usage does not unwrap")
	}
	for code, meaning := range meanings {
		if meaning == "" || slices.Index(meanings[:], meaning) != code {
			t.Errorf("exit code %d means %q", code, meaning)
		}
	}
}

func TestFlaws(t *testing.T) {
	flaws := func(change func(root *cobra.Command)) []string {
		root := program(&values{})
		change(root)
		return New(root, "TOOL_").Flaws()
	}
	find := func(root *cobra.Command, path string) *cobra.Command {
		c, _, err := root.Find(strings.Fields(path))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if out := flaws(func(*cobra.Command) {}); len(out) > 0 {
		t.Errorf("of what is right: %q", out)
	}
	for want, change := range map[string]func(root *cobra.Command){
		`tool rest: Short is ""`:                                   func(r *cobra.Command) { find(r, "rest").Short = "" },
		`tool rest: Short is "Rests."`:                             func(r *cobra.Command) { find(r, "rest").Short = "Rests." },
		`tool show one: its example is ""`:                         func(r *cobra.Command) { find(r, "show one").Example = "" },
		"example has the flag --depth":                             func(r *cobra.Command) { find(r, "rest").Example = "tool rest --depth=3" },
		"--loud of rest has no text":                               func(r *cobra.Command) { find(r, "rest").Flags().Bool("loud", false, "") },
		"--config means one thing to rest and another to show two": func(r *cobra.Command) { find(r, "show two").Flags().Lookup("config").Usage = "settings" },
		"--config means one thing to rest":                         func(r *cobra.Command) { find(r, "rest").Flags().Lookup("config").DefValue = "a" },
		"--web-port: Kubernetes sets TOOL_WEB_":                    func(r *cobra.Command) { find(r, "rest").Flags().Int("web-port", 1, "port") },
	} {
		if out := flaws(change); len(out) == 0 || !strings.Contains(strings.Join(out, "\n"), want) {
			t.Errorf("%q, want %q", out, want)
		}
	}
}

func TestReference(t *testing.T) {
	text := New(program(&values{}), "TOOL_").Reference() + ExitCodes()
	for _, line := range []string{
		"| `tool work [FILE]...` | work |",
		"| `tool show one` | show one |",
		"| `--config file` | `TOOL_CONFIG` |  | rest, show | partition file |",
		"| `--doors front,back,side` | `TOOL_DOORS` | `front` | work | for whom |",
		"| `-o, --output format` | `TOOL_OUTPUT` | `info` | work | what to print |",
		"| `--every time` | `TOOL_EVERY` | `1s` | work | time between |",
		"| 2 | " + meanings[Usage] + " |",
	} {
		if !strings.Contains(text, "\n"+line+"\n") {
			t.Errorf("it does not have %s\n%s", line, text)
		}
	}
	if strings.Contains(text, "--help`") && !strings.Contains(text, "COMMAND --help`") || strings.Contains(text, "`tool show`") {
		t.Errorf("it has --help among the flags, or a group among the commands:\n%s", text)
	}
	const document = "a\n<!-- tool: begin, by make -->\nold\n<!-- tool: end -->\nb\n"
	got, err := Splice(document, "tool", "new\n")
	if want := "a\n<!-- tool: begin, by make -->\n\nnew\n\n<!-- tool: end -->\nb\n"; err != nil || got != want {
		t.Errorf("%v\n%s", err, got)
	}
	if again, err := Splice(got, "tool", "new\n"); err != nil || again != got {
		t.Errorf("twice: %v\n%s", err, again)
	}
	for _, broken := range []string{"a\n", "<!-- tool: end -->\n<!-- tool: begin -->\n"} {
		if _, err := Splice(broken, "tool", "new"); err == nil {
			t.Errorf("%q is spliced", broken)
		}
	}
}

// A command that has moved is told of nowhere, and whatever follows it, it says where it is.
func TestMoved(t *testing.T) {
	root := program(&values{})
	root.AddCommand(NewMoved("old", "it is a program of its own: write other run"))
	p := New(root, "TOOL_")
	if flaws := p.Flaws(); len(flaws) > 0 || strings.Contains(p.Reference(), "old") {
		t.Errorf("%q, or the reference has it", flaws)
	}
	for _, line := range []string{"old", "old --help", "old -node-name n", "old x --lease= y"} {
		root := program(&values{})
		root.AddCommand(NewMoved("old", "it is a program of its own: write other run"))
		err := New(root, "TOOL_").Execute(t.Context(), strings.Fields(line), []string{"TOOL_LEASE=a/b"})
		if want := "tool old: it is a program of its own: write other run"; err == nil || err.Error() != want || ExitOf(err) != Usage {
			t.Errorf("%q: %v (exit code %d), want %s", line, err, ExitOf(err), want)
		}
	}
}

func TestVersion(t *testing.T) {
	if got := (Build{"v1.2.3", "0123456789ab", "2026-01-02"}).String(); !strings.HasPrefix(got, "v1.2.3 (commit 0123456789ab of 2026-01-02, go1.") {
		t.Error(got)
	}
	if got := (Build{}).String(); !strings.Contains(got, "(commit unknown of unknown date, ") {
		t.Error(got)
	}
}

// Both programs' flags of names and of the log.
func TestSharedFlags(t *testing.T) {
	for _, test := range []struct{ line, domain, resources, want string }{
		{"", "example.com", "example.com", ""},
		{"--domain gpus.test", "gpus.test", "gpus.test", ""},
		{"--domain gpus.test --resource-domain nvidia.com", "gpus.test", "nvidia.com", ""},
		{"--domain Example_com", "", "", "--domain: "},
		{"--resource-domain a..b", "", "", "--resource-domain: "},
	} {
		for range 20 { // it is the same flag each time
			var d Domains
			c := &cobra.Command{Use: "tool"}
			d.Register(c.Flags())
			if err := c.ParseFlags(strings.Fields(test.line)); err != nil {
				t.Fatal(err)
			}
			switch err := d.Complete(); {
			case test.want != "":
				if err == nil || ExitOf(err) != Usage || !strings.HasPrefix(err.Error(), test.want) {
					t.Errorf("%q: %v", test.line, err)
				}
			case err != nil || d.Domain != test.domain || d.ResourceDomain != test.resources:
				t.Errorf("%q: %+v, %v", test.line, d, err)
			}
		}
	}
	var l Log
	c := &cobra.Command{Use: "tool"}
	l.Register(c.Flags())
	if err := c.ParseFlags([]string{"--log-format=json", "--log-level=warn"}); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	log := l.Logger(&out)
	log.Info("quiet")
	log.Warn("loud")
	if said := out.String(); strings.Contains(said, "quiet") || !strings.HasPrefix(said, "{") || !strings.Contains(said, `"msg":"loud"`) {
		t.Error(said)
	}
	for name, want := range map[string]bool{"a/b": true, "a": false, "/b": false, "a/": false, "a/b/c": false, "": false} {
		if _, _, ok := Namespaced(name); ok != want {
			t.Errorf("%q: %v", name, ok)
		}
	}
}
