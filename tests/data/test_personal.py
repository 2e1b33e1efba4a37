"""Personal data: each kind is found, and what only looks like it is left alone."""

import pytest

from eagle3_jax.data import personal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to jane.doe@example.org today.", "Write to <EMAIL_ADDRESS> today."),
        ("Call me at +1 555 123 4567.", "Call me at <PHONE_NUMBER>."),
        ("My number is 4155552671", "My number is <PHONE_NUMBER>"),
        ("Reach us: (415) 555-2671", "Reach us: <PHONE_NUMBER>"),
        ("Tél. 06 12 34 56 78", "Tél. <PHONE_NUMBER>"),
        ("My card is 4111 1111 1111 1111, expiring soon", "My card is <CREDIT_CARD>, expiring soon"),
        ("Pay to DE89 3704 0044 0532 0130 00 please", "Pay to <IBAN_CODE> please"),
        ("and 2001:db8:85a3::8a2e:370:7334 too", "and <IP_ADDRESS> too"),
        ("SSN 536-22-8726.", "SSN <US_SSN>."),
        ("DNI 12345678Z", "DNI <ES_NIF>"),
        ("CF RSSMRA85T10A562S", "CF <IT_FISCAL_CODE>"),
        ("connect to postgres://admin:hunter2@db.internal/x", "connect to postgres://<URL_CREDENTIALS>@db.internal/x"),
        ("redis://:p@ss@cache.example.com:6379", "redis://<URL_CREDENTIALS>@cache.example.com:6379"),
    ],
)
def test_redacts(text, expected):
    redacted, found = personal.redact(text)
    assert redacted == expected
    assert sum(found.values()) == 1
    assert personal.redact(redacted) == (redacted, {})  # placeholders are not found again


def test_counts_per_kind():
    text = "a@example.org and b@example.org, card 5500 0000 0000 0004, a@example.org"
    redacted, found = personal.redact(text)
    assert dict(found) == {"EMAIL_ADDRESS": 3, "CREDIT_CARD": 1}
    assert redacted == "<EMAIL_ADDRESS> and <EMAIL_ADDRESS>, card <CREDIT_CARD>, <EMAIL_ADDRESS>"


@pytest.mark.parametrize(
    "text",
    [
        "Natalia sold 48 clips in April and half as many in May. How many is that?",
        "Compute 2024561111 * 3 and then 9876543210 / 123456789.",
        "Continue: 2 6 12 20 30 42, then 3 5 8 13 21 34 55 89, then 1 4 9 16 25 36 49 64.",
        "100 200 300 400 500, or 0.0001234567, or 0.333 333 333, or 3.14159265358979",
        "He lived 1914-1918, then 1939-1945; the year was 2010 2011 2012 2013.",
        "The debt is 5.551.234.567 euros, or 7 100 000 000, or 1,234,567,890.",
        "On 2024-03-15 at 12:30:45 we left, and came back on 15/03/2024.",
        "x[::2] and y[1::3] and std::vector<int> and ::std::cout and a::b",
        "Listen on 127.0.0.1:8080 or 0.0.0.0 or ::1",
        "np.dot(a@b.T, x) and @property and c = a@b",
        "https://example.org:8080/path?q=1 and http://localhost:3000",
        "a ratio of 3:4 @ noon",
    ],
)
def test_leaves_alone(text):
    assert personal.redact(text) == (text, {})
