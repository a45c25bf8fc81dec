package failure

import (
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// HTTP judges the result of a call to a downstream service: nil for success
// (below 400); [RetryAfter] for 429 and for 5xx with a Retry-After header;
// [Unavailable] for a transport error and other 5xx; [Permanent] with code
// http_404 and the like for other 4xx, 408 and 425 excepted, which are plain
// errors. The dependency is named by the request's host. It does not close the
// body.
func HTTP(resp *http.Response, err error) error {
	if err != nil || resp == nil {
		if err == nil {
			err = fmt.Errorf("no response")
		}
		return Unavailable("http", err)
	}
	host := "http"
	if resp.Request != nil && resp.Request.URL != nil && resp.Request.URL.Host != "" {
		host = resp.Request.URL.Host
	}
	status := fmt.Errorf("%s answered %d", host, resp.StatusCode)
	wait, given := retryAfter(resp.Header.Get("Retry-After"), time.Now())
	switch code := resp.StatusCode; {
	case code < 400:
		return nil
	case code == http.StatusTooManyRequests, code >= 500 && given:
		return &verdictError{Verdict{Kind: VerdictRetryAfter, Code: statusCode(code), Delay: wait, Err: status}}
	case code >= 500:
		return Unavailable(host, status)
	case code == http.StatusRequestTimeout, code == http.StatusTooEarly:
		return status
	default:
		return Permanent(statusCode(code), status)
	}
}

// maxRetryAfter bounds what a server may ask for.
const maxRetryAfter = time.Hour

// retryAfter reads the header of RFC 9110, section 10.2.3: seconds or a date.
func retryAfter(value string, now time.Time) (time.Duration, bool) {
	if value == "" {
		return time.Second, false
	}
	if s, err := strconv.Atoi(value); err == nil && s >= 0 {
		return min(time.Duration(min(s, 86400))*time.Second, maxRetryAfter), true
	}
	if t, err := http.ParseTime(value); err == nil {
		return min(max(0, t.Sub(now)), maxRetryAfter), true
	}
	return time.Second, false
}
