package devenv

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
)

// Cut says where a COMMIT is lost.
type Cut int

// The places at which a COMMIT is lost. The client sees the same error.
const (
	CutBefore Cut = iota // before the server has it: rolled back
	CutAfter             // after the server has applied it, before its reply arrives
)

// PostgresProxy stands between clients and a PostgreSQL without TLS. It
// understands enough of the protocol to find COMMIT (PostgreSQL, "Frontend/
// Backend Protocol"), and loses it when told to.
type PostgresProxy struct {
	URL string

	listener net.Listener
	group    sync.WaitGroup
	cuts     atomic.Int64 // COMMITs left to cut
	where    atomic.Int64
	lost     atomic.Int64

	mu      sync.Mutex
	target  string
	refuse  bool
	conns   map[net.Conn]struct{}
	stopped bool
}

// ProxyPostgres starts a proxy for the server at serverURL.
func ProxyPostgres(serverURL string) (*PostgresProxy, error) {
	u, err := url.Parse(serverURL)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &PostgresProxy{listener: l, target: u.Host, conns: map[net.Conn]struct{}{}}
	u.Host = l.Addr().String()
	p.URL = u.String()
	p.group.Add(1)
	go p.accept()
	return p, nil
}

// CutCommits loses the next n COMMITs.
func (p *PostgresProxy) CutCommits(n int, where Cut) {
	p.where.Store(int64(where))
	p.cuts.Store(int64(n))
}

// Lost is how many COMMITs were cut so far.
func (p *PostgresProxy) Lost() int64 { return p.lost.Load() }

// Refuse turns new connections away and cuts those that are there, until it is
// called with false.
func (p *PostgresProxy) Refuse(on bool) {
	p.mu.Lock()
	p.refuse = on
	p.mu.Unlock()
	if on {
		p.CutAll()
	}
}

// Redirect sends new connections to another server and cuts the old ones.
func (p *PostgresProxy) Redirect(serverURL string) error {
	u, err := url.Parse(serverURL)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.target = u.Host
	p.mu.Unlock()
	p.CutAll()
	return nil
}

// CutAll cuts every connection.
func (p *PostgresProxy) CutAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

// Close ends the proxy and all its connections.
func (p *PostgresProxy) Close() {
	p.mu.Lock()
	p.stopped = true
	p.mu.Unlock()
	_ = p.listener.Close()
	p.CutAll()
	p.group.Wait()
}

func (p *PostgresProxy) accept() {
	defer p.group.Done()
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		refuse, target := p.refuse || p.stopped, p.target
		p.mu.Unlock()
		if refuse {
			_ = c.Close()
			continue
		}
		s, err := net.Dial("tcp", target)
		if err != nil {
			_ = c.Close()
			continue
		}
		p.mu.Lock()
		p.conns[c], p.conns[s] = struct{}{}, struct{}{}
		p.mu.Unlock()
		l := &link{p: p, client: c, server: s, commits: map[string]bool{}}
		p.group.Add(2)
		go l.run(l.upstream)
		go l.run(l.downstream)
	}
}

// link is one connection through the proxy.
type link struct {
	p              *PostgresProxy
	client, server net.Conn
	commits        map[string]bool // prepared statements whose text is "commit"
	cutReply       atomic.Bool
}

var errCut = errors.New("cut")

func (l *link) run(copy func() error) {
	defer l.p.group.Done()
	_ = copy()
	_ = l.client.Close()
	_ = l.server.Close()
	l.p.mu.Lock()
	delete(l.p.conns, l.client)
	delete(l.p.conns, l.server)
	l.p.mu.Unlock()
}

// take claims one of the cuts that are left.
func (p *PostgresProxy) take() bool {
	for {
		n := p.cuts.Load()
		if n <= 0 {
			return false
		}
		if p.cuts.CompareAndSwap(n, n-1) {
			p.lost.Add(1)
			return true
		}
	}
}

// upstream copies what the client sends, message by message.
func (l *link) upstream() error {
	head := make([]byte, 4)
	if _, err := io.ReadFull(l.client, head); err != nil { // the startup message has no type byte
		return err
	}
	if err := l.pass(l.client, l.server, nil, head); err != nil {
		return err
	}
	for {
		kind, body, err := message(l.client)
		if err != nil {
			return err
		}
		if l.isCommit(kind, body) && l.p.take() {
			if Cut(l.p.where.Load()) == CutBefore {
				return errCut
			}
			l.cutReply.Store(true)
		}
		if err := send(l.server, kind, body); err != nil {
			return err
		}
	}
}

// isCommit finds COMMIT as a simple query, and as the Bind of a statement that
// was prepared with that text.
func (l *link) isCommit(kind byte, body []byte) bool {
	switch kind {
	case 'Q':
		return isCommitText(body)
	case 'P':
		name, rest, _ := bytes.Cut(body, []byte{0})
		l.commits[string(name)] = isCommitText(rest)
	case 'B':
		_, rest, _ := bytes.Cut(body, []byte{0})
		name, _, _ := bytes.Cut(rest, []byte{0})
		return l.commits[string(name)]
	}
	return false
}

func isCommitText(b []byte) bool {
	text, _, _ := bytes.Cut(b, []byte{0})
	return bytes.EqualFold(bytes.TrimSpace(text), []byte("commit"))
}

// downstream copies what the server sends.
func (l *link) downstream() error {
	for {
		kind, body, err := message(l.server)
		if err != nil {
			return err
		}
		if kind == 'C' && l.cutReply.Load() && isCommitText(body) {
			return errCut
		}
		if err := send(l.client, kind, body); err != nil {
			return err
		}
	}
}

func (l *link) pass(from io.Reader, to io.Writer, kind, head []byte) error {
	n := int64(binary.BigEndian.Uint32(head)) - 4
	if _, err := to.Write(append(kind, head...)); err != nil {
		return err
	}
	_, err := io.CopyN(to, from, n)
	return err
}

func message(r io.Reader) (kind byte, body []byte, err error) {
	head := make([]byte, 5)
	if _, err := io.ReadFull(r, head); err != nil {
		return 0, nil, err
	}
	body = make([]byte, binary.BigEndian.Uint32(head[1:])-4)
	_, err = io.ReadFull(r, body)
	return head[0], body, err
}

func send(w io.Writer, kind byte, body []byte) error {
	out := make([]byte, 5, 5+len(body))
	out[0] = kind
	binary.BigEndian.PutUint32(out[1:], uint32(len(body)+4)) //nolint:gosec // came from such a field
	_, err := w.Write(append(out, body...))
	return err
}
