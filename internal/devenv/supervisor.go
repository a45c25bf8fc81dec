package devenv

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// supervised is a server that ends with us. A shell starts it, then reads
// from a pipe: a line says how to stop and to keep the data; the end of the
// pipe, which comes also when we are killed, stops it and removes the data.
type supervised struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	done  chan struct{}
	once  sync.Once
}

// The server is started in the background with its arguments; $1 is the
// folder to remove at the end, $2 the log file, $3 the signal that ends the
// server when nobody said how.
const supervisorScript = `root=$1; log=$2; end=$3; shift 3
"$@" >>"$log" 2>&1 </dev/null &
pid=$!
echo $pid > "$root/server.pid"
if read -r how; then keep=1; else keep=0; how=$end; fi
kill -$how $pid 2>/dev/null
( sleep 20; kill -KILL $pid 2>/dev/null ) >/dev/null 2>&1 & guard=$!
wait $pid 2>/dev/null
kill $guard 2>/dev/null
[ $keep = 1 ] || rm -rf "$root"
`

func supervise(root, log, end string, cred *syscall.Credential, env []string, argv ...string) (*supervised, error) {
	cmd := exec.Command("sh", append([]string{"-c", supervisorScript, "supervisor", root, log, end}, argv...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: cred}
	cmd.Dir = root
	cmd.Env = append(os.Environ(), env...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	_ = os.Remove(filepath.Join(root, "server.pid")) // of an earlier run
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	s := &supervised{cmd: cmd, stdin: stdin, done: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(s.done)
	}()
	return s, nil
}

// stop ends the server with a signal (INT, QUIT, KILL …) and keeps its data.
func (s *supervised) stop(signal string) error {
	s.once.Do(func() {
		_, _ = io.WriteString(s.stdin, signal+"\n")
		_ = s.stdin.Close()
	})
	return s.wait()
}

// remove ends the server and removes its data.
func (s *supervised) remove() error {
	s.once.Do(func() { _ = s.stdin.Close() })
	return s.wait()
}

func (s *supervised) wait() error {
	select {
	case <-s.done:
		return nil
	case <-time.After(30 * time.Second):
		return errors.New("the server did not end within 30 s")
	}
}

// gone reports whether the server has ended by itself. The shell that started
// it notices only when it is told to stop.
func (s *supervised) gone() bool {
	text, err := os.ReadFile(filepath.Join(s.cmd.Dir, "server.pid"))
	if err != nil {
		return false // not started yet
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return false
	}
	state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil { // no such process, or no /proc
		return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	}
	_, after, _ := strings.Cut(string(state), ") ")
	return strings.HasPrefix(after, "Z") // ended; the shell has not collected it
}

// freePort is a port of 127.0.0.1 that nobody listens on.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
