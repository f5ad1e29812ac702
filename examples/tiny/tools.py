"""The tools of the corpus: parameters, requests that need them, results and replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import words
from words import Values, listed, with_articles


@dataclass(frozen=True)
class Param:
    """One argument. ``keys`` are the names it may be declared under; an optional one appends ``phrase`` when used."""

    keys: tuple[str, ...]
    type: str
    about: str
    draw: Callable[[Values], Any]
    phrase: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A tool: placeholders in ``requests`` and ``reply`` are the first keys of the parameters and the result fields."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    params: tuple[Param, ...]
    requests: tuple[str, ...]
    result: Mapping[str, Callable[[Values], Any]]
    reply: str


def _text(*keys: str, about: str, draw: Callable[[Values], Any], phrase: str = "") -> Param:
    return Param(keys, "string", about, draw, phrase)


def _whole(*keys: str, about: str, low: int, high: int, phrase: str = "") -> Param:
    return Param(keys, "integer", about, lambda v: v.number(low, high), phrase)


def _one_of(*keys: str, about: str, choices: tuple[str, ...], phrase: str = "") -> Param:
    return Param(keys, "string", about, lambda v: v.any(choices), phrase, choices)


CITY = _text("city", "location", "place", about="Name of the city", draw=Values.city)
_NAME = _text("name", "person", "contact", about="Name of the person", draw=Values.name)
_STATUS: Mapping[str, Callable[[Values], Any]] = {"status": lambda v: "ok"}
_number = lambda low, high: lambda v: v.number(low, high)  # noqa: E731

SPECS = (
    Spec(
        ("get_weather", "weather", "current_weather", "get_current_weather"),
        ("Get the current weather for a city", "Current weather in a city", "Get the weather."),
        (CITY, _one_of("unit", "units", about="Temperature unit", choices=("celsius", "fahrenheit"),
         phrase=" in {unit}")),
        ("What is the weather in {city}", "How is the weather in {city}", "What's the weather like in {city}",
         "Tell me the weather in {city}", "Check the weather for {city}"),
        {"temperature": _number(-15, 40),
         "condition": lambda v: v.any(("sunny", "cloudy", "rainy", "windy", "foggy", "snowy"))},
        "It is {temperature} degrees and {condition} in {city}.",
    ),
    Spec(
        ("get_time", "current_time", "time_in_city"), ("Get the local time of a city", "Current time in a city"),
        (CITY,), ("What time is it in {city}", "Tell me the time in {city}", "What is the local time in {city}"),
        {"time": Values.time}, "It is {time} in {city}.",
    ),
    Spec(
        ("send_email", "send_mail", "email"), ("Send an email", "Send a message by email to a person"),
        (_text("to", "recipient", about="Who gets the email", draw=Values.name),
         _text("subject", "title", about="Subject line", draw=lambda v: " ".join(v.some(words.GENERAL, 2)))),
        ("Send an email to {to} with the subject {subject}", "Email {to} about {subject}",
         "Write an email to {to}, subject {subject}"),
        _STATUS, "The email to {to} was sent.",
    ),
    Spec(
        ("add", "add_numbers", "calculator_add"), ("Add two numbers", "Return the sum of two numbers"),
        (_whole("a", "x", "first", about="First number", low=0, high=9999),
         _whole("b", "y", "second", about="Second number", low=0, high=9999)),
        ("Use the tool to add {a} and {b}", "Add {a} and {b} with the tool", "Calculate {a} + {b} with the tool"),
        {"result": _number(0, 9999)}, "The tool says {result}.",
    ),
    Spec(
        ("search_web", "web_search", "search"), ("Search the web", "Find pages on the internet"),
        (_text("query", "q", "text", about="What to search for",
         draw=lambda v: " ".join(v.some(words.GENERAL, v.number(1, 3)))),),
        ("Search the web for {query}", "Look up {query} on the web", "Find pages about {query}", "Search for {query}"),
        {"pages": _number(0, 99)}, "I found {pages} pages about {query}.",
    ),
    Spec(
        ("set_alarm", "create_alarm", "alarm"), ("Set an alarm", "Create an alarm at a time"),
        (_text("time", "at", about="Time as HH:MM", draw=Values.time),),
        ("Set an alarm for {time}", "Wake me up at {time}", "Create an alarm at {time}"), _STATUS,
        "The alarm is set for {time}.",
    ),
    Spec(
        ("set_timer", "start_timer", "timer"), ("Start a timer", "Start a countdown in minutes"),
        (_whole("minutes", "duration", about="Length in minutes", low=1, high=120),),
        ("Set a timer for {minutes} minutes", "Start a timer of {minutes} minutes"), _STATUS,
        "The timer runs for {minutes} minutes.",
    ),
    Spec(
        ("get_stock_price", "stock_price", "quote"), ("Get the stock price of a company", "Latest share price"),
        (_text("company", "symbol", "ticker", about="Company", draw=Values.company),),
        ("What is the stock price of {company}", "How much is a share of {company}",
         "Get the stock price of {company}"),
        {"price": Values.price}, "A share of {company} costs {price}.",
    ),
    Spec(
        ("convert_currency", "exchange", "currency"), ("Convert money from one currency to another",
         "Currency conversion"),
        (_whole("amount", "value", about="How much money", low=1, high=5000),
         _one_of("source", "from_currency", about="Currency to convert from",
             choices=("USD", "EUR", "GBP", "JPY", "CHF")),
         _one_of("target", "to_currency", about="Currency to convert to", choices=("SEK", "NOK", "INR", "BRL", "CAD"))),
        ("Convert {amount} {source} to {target}", "How much is {amount} {source} in {target}",
         "Exchange {amount} {source} for {target}"),
        {"result": _number(1, 9999)}, "{amount} {source} are {result} {target}.",
    ),
    Spec(
        ("translate", "translate_text", "translator"), ("Translate a text", "Translate text into another language"),
        (_text("text", "sentence", about="Text to translate",
         draw=lambda v: " ".join(v.some(words.GENERAL, v.number(1, 4)))),
         _text("language", "target_language", about="Target language", draw=lambda v: v.pick(words.LANGUAGES))),
        ('Translate "{text}" into {language}', 'Translate "{text}" to {language}',
         'How do you say "{text}" in {language}'),
        {"translation": Values.invented}, "The translation is: {translation}.",
    ),
    Spec(
        ("book_flight", "reserve_flight", "flight_booking"), ("Book a flight", "Book a flight between two cities"),
        (_text("origin", "from_city", about="City of departure", draw=Values.city),
         _text("destination", "to_city", about="City of arrival", draw=Values.city),
         _text("date", "day", about="Date as YYYY-MM-DD", draw=Values.date)),
        ("Book a flight from {origin} to {destination} on {date}",
         "I need a flight from {origin} to {destination} on {date}",
         "Reserve a flight on {date} from {origin} to {destination}"),
        {"booking": Values.code}, "Your flight from {origin} to {destination} is booked, number {booking}.",
    ),
    Spec(
        ("book_table", "reserve_table", "restaurant_booking"), ("Reserve a table in a restaurant",
         "Book a restaurant table"),
        (_text("restaurant", "place", about="Name of the restaurant", draw=Values.company),
         _whole("people", "guests", "party_size", about="Number of guests", low=1, high=12),
         _text("time", "at", about="Time as HH:MM", draw=Values.time)),
        ("Book a table for {people} at {restaurant} at {time}",
         "Reserve a table at {restaurant} for {people} people at {time}"),
        {"booking": Values.code}, "The table at {restaurant} is booked, number {booking}.",
    ),
    Spec(
        ("turn_on_light", "switch_light", "light"), ("Switch the light in a room", "Control the light of a room"),
        (_text("room", "where", about="Which room", draw=lambda v: v.pick(words.ROOMS)),
         _one_of("state", "mode", about="New state", choices=("on", "off"))),
        ("Turn {state} the light in the {room}", "Switch the light in the {room} {state}"),
        _STATUS, "The light in the {room} is {state}.",
    ),
    Spec(
        ("play_music", "play_song", "music"), ("Play music", "Play songs of an artist"),
        (_text("artist", "singer", "band", about="Name of the artist", draw=Values.full_name),),
        ("Play music by {artist}", "Play a song by {artist}", "I want to hear {artist}"), _STATUS,
        "Now playing {artist}.",
    ),
    Spec(
        ("create_event", "add_to_calendar", "calendar"), ("Create a calendar event", "Add an event to the calendar"),
        (_text("title", "event", about="Title of the event", draw=lambda v: f"{v.pick(words.GENERAL)} meeting"),
         _text("date", "day", about="Date as YYYY-MM-DD", draw=Values.date)),
        ("Add {title} to my calendar on {date}", "Create an event {title} on {date}",
         "Put {title} in the calendar for {date}"),
        _STATUS, "{title} is in your calendar on {date}.",
    ),
    Spec(
        ("get_population", "population", "count_people"), ("Get the population of a city",
         "Number of people in a city"),
        (CITY,), ("How many people live in {city}", "What is the population of {city}"),
        {"population": _number(1000, 999999)}, "{population} people live in {city}.",
    ),
    Spec(
        ("find_contact", "get_phone", "lookup_contact"), ("Find the phone number of a person", "Look up a contact"),
        (_NAME,), ("What is the phone number of {name}", "Find the number of {name}", "Look up the contact {name}"),
        {"phone": lambda v: f"555-{v.number(1000, 9999)}"}, "The number of {name} is {phone}.",
    ),
    Spec(
        ("track_package", "package_status", "track_order"), ("Track a package", "Get the status of a package"),
        (_text("code", "tracking_number", "id", about="Tracking code", draw=Values.code),),
        ("Where is package {code}", "Track the package {code}", "What is the status of package {code}"),
        {"state": lambda v: v.any(("shipped", "delivered", "delayed", "lost")), "city": Values.city},
        "Package {code} is {state}, last seen in {city}.",
    ),
    Spec(
        ("add_items", "shopping_list", "add_to_list"), ("Add items to the shopping list", "Put things on a list"),
        (Param(("items", "things"), "array", "Items to add", lambda v: v.some(words.FOODS, v.number(1, 4))),),
        ("Add {items} to my shopping list", "Put {items} on the list"), _STATUS, "I added {items} to the list.",
    ),
    Spec(
        ("set_temperature", "thermostat", "set_heating"), ("Set the temperature of a room", "Control the heating"),
        (_text("room", "where", about="Which room", draw=lambda v: v.pick(words.ROOMS)),
         _whole("degrees", "temperature", about="Degrees Celsius", low=12, high=28)),
        ("Set the {room} to {degrees} degrees", "Heat the {room} to {degrees} degrees"),
        _STATUS, "The {room} is set to {degrees} degrees.",
    ),
    Spec(
        ("set_reminder", "remind", "create_reminder"), ("Create a reminder", "Remind the user of something"),
        (_text("text", "message", "what", about="What to remember",
         draw=lambda v: f"{v.any(('buy', 'clean', 'bring', 'fix'))} the {v.pick(words.OBJECTS)}"),
         _text("time", "when", about="Time as HH:MM", draw=Values.time)),
        ("Remind me to {text} at {time}", "At {time}, remind me to {text}", "Set a reminder at {time}: {text}"),
        _STATUS, "I will remind you at {time}.",
    ),
    Spec(
        ("door", "lock_door", "set_lock"), ("Lock or unlock a door", "Control a door lock"),
        (_text("door", "room", about="Which door", draw=lambda v: v.pick(words.ROOMS)),
         Param(("locked", "lock"), "boolean", "true to lock", lambda v: v.any((True, False)))),
        ("Please set the {door} door to locked {locked}", "Set locked to {locked} for the {door} door"),
        _STATUS, "The {door} door is updated.",
    ),
)  # fmt: skip

_ACTIONS = [
    "paint", "clean", "move", "count", "open", "close", "sell", "buy", "rent", "fix",
    "weigh", "test", "scan", "print", "ship", "store", "feed", "wash", "label", "check",
]  # fmt: skip
_KEYS = (
    Param(("color",), "string", "", lambda v: v.pick(words.COLORS)),
    Param(("owner",), "string", "", Values.name),
    Param(("city",), "string", "", Values.city),
    Param(("count",), "integer", "", _number(1, 500)),
    Param(("code",), "string", "", Values.code),
    Param(("day",), "string", "", lambda v: v.any(words.DAYS)),
    Param(("size",), "integer", "", _number(1, 99)),
    Param(("price",), "number", "", Values.price),
    Param(("room",), "string", "", lambda v: v.pick(words.ROOMS)),
    Param(("company",), "string", "", Values.company),
    Param(("year",), "integer", "", _number(1950, 2040)),
    Param(("urgent",), "boolean", "", lambda v: v.any((True, False))),
)


def invented_spec(v: Values) -> Spec:
    """A tool of random verb, noun and parameters, so that names must be read from the declaration."""
    action, noun = v.any(_ACTIONS), v.pick(words.OBJECTS + words.ANIMALS)
    params = tuple(v.rng.sample(_KEYS, v.number(1, 3)))
    stated = [f"{p.keys[0]} {{{p.keys[0]}}}" for p in params]
    return Spec(
        (f"{action}_{noun}", f"{noun}_{action}"),
        (with_articles(f"{action.capitalize()} a {noun}"), f"Tool to {action} the {noun}"),
        params,
        (
            f"{action.capitalize()} the {noun} with {listed(stated)}",
            with_articles(f"Please {action} a {noun}: {', '.join(stated)}"),
        ),
        _STATUS,
        f"The {noun} is done.",
    )
