"""The words that all demo databases share: value pools, and what each column name means.

A small model must learn every word from a few thousand questions, so domains reuse these columns
and values.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

COUNTRY_OF_CITY = {
    "Paris": "France",
    "Lyon": "France",
    "London": "England",
    "Oxford": "England",
    "Berlin": "Germany",
    "Munich": "Germany",
    "Madrid": "Spain",
    "Seville": "Spain",
    "Rome": "Italy",
    "Milan": "Italy",
    "Tokyo": "Japan",
    "Osaka": "Japan",
    "Cairo": "Egypt",
    "Lima": "Peru",
    "Boston": "America",
    "Chicago": "America",
    "Toronto": "Canada",
    "Delhi": "India",
    "Mumbai": "India",
    "Sydney": "Australia",
}

POOLS = {
    name: tuple(words.split())
    for name, words in {
        "person": "Alice Adam Ben Bella Carl Clara Dan Diana Emma Eric Frank Fiona Grace George "
        "Helen Henry Iris Ivan Jack Julia Karl Kate Leo Lucy Mark Maria Nina Noah Oscar Olga Paul "
        "Peter Rosa Ryan Sara Simon Tina Tom Vera Victor",
        "place": "Alpha Bridge Castle Central Crown Delta Eagle Forest Garden Golden Grand Harbor "
        "Hill Lake Liberty Lion Maple Meadow Moon North Ocean Palace Park Pearl River Royal Silver "
        "South Star Summit Sun Valley Victoria West",
        "title": "Autumn Beauty Courage Dawn Desert Dream Echo Fire Freedom Ghost Glory Heart Home "
        "Hope Island Journey Legend Light Magic Memory Mirror Mountain Mystery Night Promise Rain "
        "Secret Shadow Silence Storm Summer Sunrise Thunder Time Voyage Winter",
        "team": "Bears Bulls Comets Dragons Eagles Falcons Foxes Giants Hawks Hornets Jets Kings "
        "Lions Panthers Pirates Rangers Rockets Sharks Stars Tigers Wolves Wizards",
        "food": "Bread Burger Cake Cheese Chicken Coffee Curry Fish Noodles Pasta Pie Pizza Rice "
        "Salad Sandwich Soup Steak Stew Taco Tea Toast Waffle",
        "item": "Bag Ball Bed Bike Book Camera Chair Clock Cup Desk Drum Guitar Hat Jacket Knife "
        "Lamp Mirror Pen Phone Piano Radio Shirt Shoe Sofa Table Tent Watch",
        "subject": "art biology chemistry history math music physics sport",
        "color": "black blue brown green red white yellow",
        "gender": "male female",
        "language": "Arabic English French German Italian Japanese Spanish",
        "status": "active closed new pending",
        "level": "low medium high",
        "size": "small medium large",
        "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        "season": "spring summer autumn winter",
        "genre": "action comedy crime drama fantasy horror romance",
        "music": "blues classical folk jazz pop rock",
        "degree": "bachelor master doctor",
        "cuisine": "Chinese French Greek Indian Italian Mexican Thai",
        "sport": "baseball football hockey rugby tennis volleyball",
        "position": "defender forward goalkeeper midfielder",
        "job": "assistant clerk director engineer manager secretary",
        "industry": "banking energy media retail software transport",
        "ward": "cancer children emergency eye heart surgery",
        "animal": "cow goat horse pig sheep",
        "crop": "barley corn potato rice soy wheat",
        "art": "drawing painting photo sculpture",
        "brand": "Acme Apex Nova Orion Titan Zenith",
        "house": "apartment cottage office studio villa",
        "room": "double family single suite",
        "payment": "card cash check",
        "course": "breakfast dessert dinner lunch starter",
        "plane": "cargo jet propeller",
        "material": "cotton glass metal plastic wood",
        "fuel": "diesel electric gas hybrid",
        "car": "bus coupe sedan truck van",
        "pet": "bird cat dog fish rabbit",
        "award": "bronze gold silver",
        "network": "cable radio satellite stream",
        "email": "apple cherry grape lemon melon olive peach plum",
    }.items()
} | {"city": tuple(COUNTRY_OF_CITY), "country": tuple(dict.fromkeys(COUNTRY_OF_CITY.values()))}


@dataclass(frozen=True, slots=True)
class Number:
    """A numeric column. Words are empty where English has none.

    Attributes:
        low: Smallest value.
        high: Largest value.
        step: Distance between neighbouring values; 0.5 makes a REAL column.
        synonym: Another name of the column.
        extremes: Superlatives of the largest and the smallest value.
        comparisons: Words before a threshold, for values above and values below it.
        can_add: Whether a total makes sense.
        can_average: Whether a mean makes sense.
    """

    low: int
    high: int
    step: float = 1
    _: KW_ONLY
    synonym: str = ""
    extremes: tuple[str, str] = ("", "")
    comparisons: tuple[str, str] = ("", "")
    can_add: bool = False
    can_average: bool = True


@dataclass(frozen=True, slots=True)
class Category:
    """A text column with few values, each in several rows.

    Attributes:
        pool: Key into `POOLS`.
        synonym: Another name of the column, or "".
        before: Words that lead from the noun to the value, as in "from Paris".
    """

    pool: str
    synonym: str = ""
    before: tuple[str, ...] = ()


NUMBERS = {
    "age": Number(
        18, 70, extremes=("oldest", "youngest"), comparisons=("older than", "younger than")
    ),
    "price": Number(
        2,
        60,
        0.5,
        synonym="cost",
        extremes=("most expensive", "cheapest"),
        comparisons=("costing more than", "costing less than"),
        can_add=True,
    ),
    "salary": Number(
        1200,
        9000,
        100,
        synonym="wage",
        extremes=("best paid", "worst paid"),
        comparisons=("earning more than", "earning less than"),
        can_add=True,
    ),
    "rating": Number(
        1,
        10,
        0.5,
        synonym="score",
        extremes=("best rated", "worst rated"),
        comparisons=("rated above", "rated below"),
    ),
    "weight": Number(
        1,
        90,
        extremes=("heaviest", "lightest"),
        comparisons=("heavier than", "lighter than"),
        can_add=True,
    ),
    "height": Number(
        150, 210, extremes=("tallest", "shortest"), comparisons=("taller than", "shorter than")
    ),
    "length": Number(
        2,
        90,
        extremes=("longest", "shortest"),
        comparisons=("longer than", "shorter than"),
        can_add=True,
    ),
    "area": Number(
        20,
        900,
        10,
        synonym="surface",
        extremes=("largest", "smallest"),
        comparisons=("larger than", "smaller than"),
        can_add=True,
    ),
    "speed": Number(
        40, 900, 10, extremes=("fastest", "slowest"), comparisons=("faster than", "slower than")
    ),
    "distance": Number(100, 5000, 50, extremes=("farthest", "nearest"), can_add=True),
    "duration": Number(5, 180, 5, extremes=("longest", "shortest"), can_add=True),
    "year": Number(
        1990,
        2024,
        extremes=("latest", "earliest"),
        comparisons=("dated after", "dated before"),
        can_average=False,
    ),
    "founding_year": Number(
        1850,
        2015,
        extremes=("newest", "oldest"),
        comparisons=("founded after", "founded before"),
        can_average=False,
    ),
    "birth_year": Number(1940, 2005, comparisons=("born after", "born before"), can_average=False),
    "capacity": Number(20, 900, 10, synonym="seats", can_add=True),
    "population": Number(
        100, 9900, 100, extremes=("most populated", "least populated"), can_add=True
    ),
    "budget": Number(10, 900, 10, synonym="funding", extremes=("richest", "poorest"), can_add=True),
    "sales": Number(10, 990, 5, synonym="revenue", can_add=True),
    "amount": Number(5, 500, 5, can_add=True),
    "quantity": Number(1, 40, can_add=True),
    "stock": Number(0, 200, can_add=True),
    "points": Number(1, 99, can_add=True),
    "goals": Number(0, 60, can_add=True),
    "wins": Number(0, 50, synonym="victories", can_add=True),
    "visitors": Number(50, 9500, 50, extremes=("most visited", "least visited"), can_add=True),
    "pages": Number(60, 900, 10, can_add=True),
    "hours": Number(1, 60, can_add=True),
    "credits": Number(1, 12, can_add=True),
    "floors": Number(1, 40, can_add=True),
    "rooms": Number(1, 90, can_add=True),
    "grade": Number(1, 10, 0.5, synonym="mark"),
    "experience": Number(0, 40, extremes=("most experienced", "least experienced")),
    "votes": Number(10, 999, can_add=True),
}

CATEGORIES = {
    "city": Category("city", "town", ("in", "from")),
    "country": Category("country", "nation", ("in", "from")),
    "color": Category("color", "colour"),
    "gender": Category("gender", "sex"),
    "language": Category("language", "", ("in",)),
    "status": Category("status", "state"),
    "level": Category("level"),
    "size": Category("size"),
    "day": Category("day", "weekday", ("on",)),
    "season": Category("season", "", ("in",)),
    "type": Category("size", "kind", ("of type",)),
    "genre": Category("genre", "style", ("of genre",)),
    "subject": Category("subject", "topic"),
    "position": Category("position", "role"),
    "industry": Category("industry", "sector"),
    "brand": Category("brand", "maker", ("by",)),
    "payment": Category("payment"),
    "material": Category("material", "", ("made of",)),
    "degree": Category("degree"),
    "crop": Category("crop"),
    "sport": Category("sport"),
    "fuel": Category("fuel"),
    "network": Category("network"),
}

# Columns with gaps; only the questions about missing values use them.
SPARSE = {"phone": "number", "email": "email", "nickname": "title"}

# Nouns whose plural is the same word.
PLURALS = (
    *("aircraft", "credits", "floors", "goals", "hours", "pages", "points", "rooms", "sales"),
    *("seats", "series", "stock", "victories", "visitors", "votes", "wins"),
)
