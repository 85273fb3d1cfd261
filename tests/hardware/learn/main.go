// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/mps"
	"example.com/gpu-agent/tests/hardware/ask"
	"example.com/gpu-agent/tests/hardware/dry"
)

func main() {
	mps.Main()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := learn(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "learn:", err)
		os.Exit(1)
	}
}

func learn(ctx context.Context, args []string, w io.Writer) error {
	flags := flag.NewFlagSet("learn", flag.ContinueOnError)
	model := flags.String("model", "H200-141GB", "the emulator's card that is nearest")
	keep := flags.String("keep", "", "keep the answers in tests/testdata/cards, under this name")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return errors.New("usage: learn [-model MODEL] [-keep NAME] FOLDER")
	}
	folder := flags.Arg(0)
	if found, err := filepath.Glob(filepath.Join(folder, "*.jsonl")); err != nil || len(found) == 0 {
		return fmt.Errorf("%s has no answers: name the folder that dist/test-gpu/run has made", folder)
	}
	scratch, err := os.MkdirTemp("", "learn-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	kit, ours := filepath.Join(scratch, "kit"), filepath.Join(scratch, "answers")
	if out, err := exec.CommandContext(ctx, "go", "run", "example.com/gpu-agent/tests/hardware/kit", kit).CombinedOutput(); err != nil {
		return fmt.Errorf("make the kit: %w\n%s", err, out)
	}
	questions, err := listed(ctx, kit)
	if err != nil {
		return err
	}
	if err := emulated(ctx, *model, kit, ours); err != nil {
		return err
	}
	if err := compare(w, questions, folder, ours); err != nil {
		return err
	}
	if *keep == "" {
		return nil
	}
	to := filepath.Join("tests", "testdata", "cards", *keep)
	if err := os.CopyFS(to, os.DirFS(folder)); err != nil {
		return fmt.Errorf("keep the answers: %w", err)
	}
	fmt.Fprintf(w, "the answers are kept in %s\n", to)
	return nil
}

// listed are the kit's questions.
func listed(ctx context.Context, kit string) (list []ask.Question, err error) {
	out, err := exec.CommandContext(ctx, filepath.Join(kit, "run"), "questions").Output()
	if err != nil {
		return nil, fmt.Errorf("ask the kit for its questions: %w", err)
	}
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, fmt.Errorf("ask the kit for its questions: %w", err)
	}
	return list, nil
}

// emulated has the emulated driver answer into a folder.
func emulated(ctx context.Context, model, kit, folder string) error {
	d, err := dry.Start(ctx, emulator.Spec{Model: model, Count: 1})
	if err != nil {
		return err
	}
	if err := d.LayMPS(); err != nil {
		return errors.Join(err, d.End())
	}
	cmd := exec.CommandContext(ctx, filepath.Join(kit, "run"), "-out", folder, "10m")
	cmd.Env = append(os.Environ(), d.Env)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("ask the emulated driver: %w\n%s", err, out)
	}
	return errors.Join(err, d.End())
}

// compare prints where two folders differ.
func compare(w io.Writer, questions []ask.Question, card, ours string) error {
	table := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "QUESTION\tTHE CARD\tTHE EMULATOR\tWHAT RESTS ON IT")
	same, differ := 0, 0
	var open, alone []string
	for i := range questions {
		q := &questions[i]
		says, err := answerIn(card, q.Name)
		if err != nil || says.Says == ask.Unknown {
			why := says.Why
			if err != nil {
				why = err.Error()
			}
			open = append(open, fmt.Sprintf("%s: %s", q.Name, why))
			continue
		}
		we, err := answerIn(ours, q.Name)
		switch {
		case q.NotEmulated != "":
			alone = append(alone, fmt.Sprintf("%s %v", q.Asks, says))
		case err == nil && q.Same(says, we):
			same++
		default:
			differ++
			text := fmt.Sprint(we)
			if err != nil {
				text = err.Error()
			}
			fmt.Fprintf(table, "%s\t%v\t%s\t%s\n", q.Asks, says, text, strings.Join(q.Code, " "))
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "%d the same, %d differ\n", same, differ)
	for _, list := range []struct {
		what  string
		lines []string
	}{{"what only a card tells:", alone}, {"what the card did not tell:", open}} {
		if len(list.lines) > 0 {
			fmt.Fprintf(w, "\n%s\n  %s\n", list.what, strings.Join(list.lines, "\n  "))
		}
	}
	return nil
}

func answerIn(folder, name string) (ask.Answer, error) {
	lines, err := ask.Read(folder, name)
	if errors.Is(err, fs.ErrNotExist) {
		return ask.Answer{}, errors.New("it was not asked")
	}
	if err != nil {
		return ask.Answer{}, err
	}
	return ask.AnswerIn(lines)
}
